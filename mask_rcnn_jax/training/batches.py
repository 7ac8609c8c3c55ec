"""Batches of a run: of training, of evaluation and of tiles."""

from collections.abc import Sequence
from typing import Any

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mask_rcnn_jax.data import dataset as datasets
from mask_rcnn_jax.data.augment import Kind
from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.eval_loader import EvalLoader
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import DataOptions, ExampleOptions
from mask_rcnn_jax.data.overview import image_ids
from mask_rcnn_jax.data.repeat import Repeats
from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.data.tile_loader import TileLoader
from mask_rcnn_jax.data.tiles import Tiles
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.data.views import scaled_options
from mask_rcnn_jax.recipe.options import TrainOptions, Views
from mask_rcnn_jax.structures import Batch


def make_train_loader(
    data: DataOptions,
    train: TrainOptions,
    dataset: Dataset,
    start_step: int,
    augment: Sequence[Kind],
) -> TrainLoader:
    """This process' share of the training batches from a step on."""
    order = TrainOrder(
        train.seed,
        train.batch_size // jax.process_count(),
        start_step,
        keep_empty=data.keep_empty,
        skip=_places(dataset, train.skip_images),
        repeats=Repeats(data.repeat_threshold),
        **_share(),
    )
    if data.windows.is_on and "fixed_size_crop" not in data.augment:
        _check_scale(data)
    options, workers = data.in_training(), data.num_workers
    return TrainLoader(dataset, options, order, num_workers=workers, augment=augment)


def _check_scale(data: DataOptions) -> None:
    """Warn if tiles as large as the windows are resized where the windows are not."""
    size = data.windows.size
    seen = resize_plan(*size, data).size
    if seen != size:
        logging.warning(
            "data.image_size=%s makes %d x %d pixels of tiles as large as data.windows.size=%s, "
            "which training sees as they are; data.image_size=%s does not, and --tile=%d fits",
            *(data.image_size, *seen, size, size, max(size)),
        )


def _places(dataset: Dataset, ids: Sequence[int | str]) -> frozenset[int]:
    place = {image_id: index for index, image_id in enumerate(image_ids(dataset))}
    unknown = [image_id for image_id in ids if image_id not in place]
    if unknown:
        raise ValueError(
            f"train.skip_images has {unknown[0]!r}, expected ids of images of "
            f"{datasets.dataset_name(dataset)}"
        )
    return frozenset(place[image_id] for image_id in ids)


def abstract_train_batch(
    data: DataOptions, batch_size: int, canvas: tuple[int, int], mesh: Mesh
) -> Batch:
    """Shapes, dtypes and shardings of a training batch of all processes."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype, sharding=sharding),
        empty_batch(1, canvas, data.in_training()),
    )


def make_eval_loader(
    dataset: Dataset,
    options: ExampleOptions,
    *,
    batch_size: int,
    max_images: int,
    num_workers: int,
    fill: bool = False,
) -> EvalLoader:
    """Batches of the first `max_images` images (0: all), this process' share.

    batch_size: on each device. fill: take smaller batches rather than one that is not full.
    """
    if fill:
        num_images = min(max_images or len(dataset.images), len(dataset.images))
        batch_size = max(1, min(batch_size, num_images // jax.device_count()))
    rows = batch_size * jax.local_device_count()
    numbers: dict[str, Any] = {"batch_size": rows, "max_images": max_images, **_share()}
    return EvalLoader(dataset, options, num_workers=num_workers, **numbers)


def make_tile_loader(
    dataset: Dataset, options: ExampleOptions, tiles: Tiles, *, batch_size: int, max_images: int
) -> TileLoader:
    """Batches of the tiles of the first `max_images` images, as from `make_eval_loader`."""
    rows = batch_size * jax.local_device_count()
    numbers = {"batch_size": rows, "max_images": max_images, **_share()}
    return TileLoader(dataset, options, tiles, **numbers)


def _share() -> dict[str, int]:
    return {"process_index": jax.process_index(), "process_count": jax.process_count()}


def view_sizes(data: DataOptions, views: Views) -> list[ExampleOptions]:
    """Options of the images in each size of `eval.tta_scales`; ValueError names a wrong entry."""
    return [scaled_options(data, scale) for scale in views.tta_scales]
