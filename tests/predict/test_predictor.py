import io
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from PIL import Image

from mask_rcnn_jax import infer
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.predict import batches as batches_module
from mask_rcnn_jax.predict.pixels import to_pixels
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.serving.service import Service
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.weights.restore import Restored
from tests.helpers import tiny_config
from tests.predict.conftest import two_canvas_config
from tests.predict.test_result import make_result

XLA_DEFAULTS = True

# Both orientations, squares, slivers and a single pixel, with various valid extents.
SIZES = [(48, 64), (64, 48), (50, 50), (30, 200), (200, 30), (48, 90), (1, 1), (40, 61), (96, 48)]


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


@pytest.fixture(scope="module")
def compilations():
    """XLA compilations in this process."""
    names = []

    def note(event: str, _: float, **kwargs) -> None:
        if "backend_compile" in event:
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="module")
def alone(variables, images, compilations):
    """Detections of each image from four concurrent threads that need the same programs."""
    predictor = Predictor(two_canvas_config(), variables)
    compilations.clear()
    results = [None] * 4

    def work(at: int) -> None:
        results[at] = [predictor(image) for image in images]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 2, "one for landscape, one for portrait"
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(one, name), getattr(expected, name))
    return results[0]


ARRAYS = ("classes", "boxes", "scores", "mask_grids")


def assert_same(found, expected, tolerances=(0, 2e-3, 1e-5, 1e-4)):
    for name, atol in zip(ARRAYS, tolerances, strict=True):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=0, atol=atol, err_msg=name
        )


def test_threads_share_compiled_programs(alone):
    assert any(len(found) for found in alone)


def test_batches_match_single_images(alone, predictor, images, compilations):
    together = predictor(images)
    assert len(together) == len(images)
    for image, found, expected in zip(images, together, alone, strict=True):
        assert_same(found, expected)
        height, width = image.shape[:2]
        assert (found.boxes >= 0).all() and (found.boxes <= [width, height, width, height]).all()
        assert len(found) <= 5 and found.mask_grids.shape == (len(found), 28, 28)
        assert found.image is image and (found.classes > 0).all()
    assert_same(predictor(images[0]), alone[0])  # a single image in a padded batch
    same_size = np.stack([images[0], images[0][::-1]])
    assert_same(predictor(same_size)[0], alone[0])
    assert predictor([]) == []
    compilations.clear()
    predictor(images[::-1])
    assert not compilations


def test_stream_keeps_the_order(alone, predictor, images):
    order = [0, 1, 2, 0, 0, 1, 3, 0, 4, 0, 0, 0, 1]
    prepared = [(key, predictor.prepare(images[index])) for key, index in enumerate(order)]
    found = list(predictor.stream(iter(prepared)))
    assert [key for key, _, _ in found] == [*range(len(order))]
    for (_, image, detections), index in zip(found, order, strict=True):
        assert image.image is images[index]
        assert_same(predictor.result(image, detections), alone[index])


def test_waiting_for_a_full_batch_is_limited(predictor, images, monkeypatch):
    """One portrait followed by endless landscapes is returned after a few batches."""

    def prepared(taken):
        for number in range(10**6):
            taken.append(number)
            yield number, predictor.prepare(images[0 if number else 1])

    taken = []
    stream = predictor.stream(prepared(taken))
    assert next(stream)[0] == 0
    assert len(taken) <= predictor.images_at_once * (batches_module.MAX_WAITING_BATCHES + 2)
    stream.close()
    monkeypatch.setattr(batches_module, "MAX_WAITING_BYTES", 0)
    taken.clear()
    stream = predictor.stream(prepared(taken))
    assert next(stream)[0] == 0
    assert len(taken) <= 3
    stream.close()


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 5), np.uint8),
        np.zeros((4, 5, 4), np.uint8),
        np.zeros((4, 5, 3), np.float32),
        np.zeros((0, 5, 3), np.uint8),
    ],
    ids=["gray", "RGBA", "float", "empty"],
)
def test_invalid_images_are_rejected(predictor, image):
    for call in (lambda: predictor(image), lambda: predictor([image])):
        with pytest.raises(ValueError, match="expected uint8"):
            call()


@pytest.mark.parametrize("kind", ["path", "text", "PIL", "bytes", "bytearray", "BytesIO"])
def test_files_and_images_of_pillow(alone, predictor, images, tmp_path, kind):
    path = tmp_path / "a.png"
    Image.fromarray(images[1]).save(path)
    content = path.read_bytes()
    given = {
        "path": path, "text": str(path), "PIL": Image.fromarray(images[1]), "bytes": content,
        "bytearray": bytearray(content), "BytesIO": io.BytesIO(content),
    }[kind]  # fmt: skip
    found = predictor(given)
    assert_same(found, alone[1])
    assert found.path == (str(path) if kind in ("path", "text") else "")
    if kind == "BytesIO":
        given.seek(0)
    mixed = predictor([given, images[0]])
    assert_same(mixed[0], alone[1])
    assert_same(mixed[1], alone[0])


def test_pillows_images_are_turned_upright(predictor):
    image = Image.new("L", (60, 40))
    image.getexif()[0x0112] = 6  # turned by 90 degrees
    assert predictor(image).image.shape == (60, 40, 3)


def test_16_bits_of_pillow_are_read_as_from_a_file(tmp_path):
    gray = np.random.default_rng(0).integers(0, 2**16, (30, 40), np.uint16)
    Image.fromarray(gray).save(tmp_path / "a.png")
    with Image.open(tmp_path / "a.png") as image:
        np.testing.assert_array_equal(to_pixels(image), to_pixels(tmp_path / "a.png"))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_in_no_known_range_are_refused(mode):
    with pytest.raises(ValueError, match=f"mode {mode}, expected 8 or 16 bits"):
        to_pixels(Image.new(mode, (4, 4)))


def test_names_come_from_the_categories(alone, predictor, images):
    assert {name for found in predictor(images) for name in found.names} <= {"bolt", "nut"}
    assert {name for found in alone for name in found.names} <= {"class 1", "class 2"}


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("absent.jpg", FileNotFoundError, "absent.jpg"),
        (__file__, ValueError, "test_predictor.py: truncated, damaged or not an image"),
        (b"no image", ValueError, "image: truncated, damaged or not an image"),
        (3, TypeError, "image is a int, expected a file"),
        ([None], TypeError, "image is a NoneType, expected a file"),
    ],
)
def test_what_is_no_image_is_named(predictor, image, error, message):
    with pytest.raises(error, match=message):
        predictor(image)


def test_batch_size_of_zero_is_rejected(variables):
    with pytest.raises(ValueError, match="batch_size is 0, expected at least 1"):
        Predictor(two_canvas_config(), variables, batch_size=0)


@pytest.mark.slow
def test_every_number_of_devices_finds_the_same(alone, variables, images, monkeypatch):
    """`alone` is of both devices of the tests."""
    assert jax.local_device_count() == 2
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[1:])
    one = Predictor(two_canvas_config(), variables)
    assert one.images_at_once == 1
    wide = [at for at, (height, width) in enumerate(SIZES) if width > height]  # one program
    for at, found in zip(wide, one([images[at] for at in wide]), strict=True):
        assert_same(found, alone[at], [5e-5] * 4)  # XLA rounds differently


@pytest.mark.slow
def test_thousands_of_detections(variables):
    """More rows than candidates: the rest is padding."""
    config = two_canvas_config()
    config.model.update(rpn=dict(pre_nms_topk_test=1000, post_nms_topk_test=900))
    config.eval.update(pre_nms_topk=1800, detections_per_image=2000, nms_thresh=1.0)
    found = Predictor(config, variables)(np.zeros((48, 64, 3), np.uint8))
    assert 100 < len(found) <= 1800 and found.mask_grids.shape == (len(found), 28, 28)
    assert (np.diff(found.scores) <= 0).all()


def test_infer_drops_what_soft_nms_lowers_below_its_threshold(monkeypatch, tmp_path):
    class Stop(Exception):
        pass

    def stop(recipe, *_):
        found.append(recipe.eval)
        raise Stop

    found, restored = [], Restored(as_recipe(tiny_config()), {}, [], None)
    monkeypatch.setattr(infer, "restore", lambda *_, **options: restored)
    monkeypatch.setattr(infer, "Predictor", stop)
    photo = tmp_path / "photo.jpg"
    photo.touch()
    for threshold in (0.7, 0.0):
        with pytest.raises(Stop):
            options = infer.Options(threshold, batch_size=1)
            infer.infer(None, "run", [str(photo)], str(tmp_path / "out"), options)
    assert [detect.score_threshold for detect in found] == [0.7, 0.0]
    assert [detect.soft_min_score for detect in found] == [0.7, 1e-3]


def options_of(monkeypatch, **flags):
    """What `infer` is called with for these flags, and all others unset."""
    unset = dict(draw=None, color_by=None, line_width=0, save=[], batch_size=0, stride=1)
    unset |= dict(max_frames=0, tile=0, overlap=0.2, track=False, score_threshold=0.5)
    unset |= dict(config=None, input=["photo.jpg"], output="out", public_addresses_only=False)
    unset |= dict(accept_mismatch=False, merge=None, input_key="file_name", no_images=False)
    unset |= dict(shard="", max_skipped=None, keypoint_threshold=None)
    calls = []
    monkeypatch.setattr(infer.flags, "FLAGS", SimpleNamespace(**unset | flags))
    monkeypatch.setattr(infer, "given_model", lambda _: "run")
    monkeypatch.setattr(infer, "infer", lambda *given: calls.append(given[-1]))
    infer.main([])
    return calls[0]


@pytest.mark.parametrize(
    ("drawn", "color_by", "expected"),
    [
        (["boxes, masks"], None, {"boxes": True, "masks": True}),
        (["none"], "class", {}),
    ],
)
def test_flags_say_what_infer_draws(drawn, color_by, expected, monkeypatch):
    options = options_of(monkeypatch, draw=drawn, color_by=color_by, line_width=3).drawing
    parts = dict.fromkeys(("labels", "scores", "boxes", "masks", "keypoints"), False)
    expected = parts | expected | {"line_width": 3} | ({"color_by": color_by} if color_by else {})
    expected |= {"keypoint_threshold": None}
    assert options == expected
    assert make_result().plot(**options).shape == (360, 540, 3)


@pytest.mark.parametrize("flag", ["save", "draw"])
def test_an_unknown_kind_is_named(flag, monkeypatch):
    with pytest.raises(ValueError, match=f"--{flag} has 'mask', expected some of "):
        options_of(monkeypatch, **{flag: ["masks", "mask"]})


def test_lists_of_a_repeated_flag_are_joined(monkeypatch):
    saved = options_of(monkeypatch, save=["masks, csv", "yolo", ""]).save
    assert saved == ["masks", "csv", "yolo"]


class Recorded:
    """A model that detects the mean of each row as a score, and notes the shapes of all batches."""

    def __init__(self):
        self.shapes = []

    def check(self, plan):
        """Any size will do."""

    def __call__(self, images, image_sizes):
        rows = len(images)
        self.shapes.append(images.shape[:3])
        return Detections(
            boxes=np.zeros((rows, 1, 4), np.float32),
            scores=np.asarray(images, np.float32).mean((1, 2, 3))[:, None],
            classes=np.ones((rows, 1), np.int32),
            masks=None,
            valid=np.ones((rows, 1), bool),
        )


@pytest.fixture
def recorded(monkeypatch, variables):
    """Make a predictor of two devices, and the model that it asks."""

    def make(config=None, **options):
        predictor = Predictor(config or two_canvas_config(), variables, **options)
        model = Recorded()
        monkeypatch.setattr(predictor, "_model", model)
        return predictor, model

    return make


@pytest.mark.parametrize(
    ("count", "split", "rows"),
    [
        (1, True, [2]),
        (5, True, [2, 2, 2]),
        (6, True, [6]),
        (9, True, [6, 2, 2]),
        (5, False, [6]),
        (9, False, [6, 6]),
    ],
)
def test_a_batch_that_is_not_full_may_run_in_parts(recorded, count, split, rows):
    """On two devices, with three rows each."""
    predictor, model = recorded(batch_size=3, split_partial=split)
    assert predictor.images_at_once == 6
    given = [np.full((48, 64, 3), 20 * number + 9, np.uint8) for number in range(count)]
    found = predictor(given)
    assert [shape[0] for shape in model.shapes] == rows
    scores = [float(one.scores[0]) for one in found]
    assert scores == sorted(scores) and len(set(scores)) == count


def test_squares_have_a_canvas_of_their_own(recorded, images):
    config = two_canvas_config()
    config.data.canvases = ((64, 64),)
    predictor, model = recorded(config)
    for image in images:
        predictor(image)
    canvases = dict(zip(SIZES, [shape[1:] for shape in model.shapes], strict=True))
    squares = {size for size, canvas in canvases.items() if canvas == (64, 64)}
    assert squares == {(50, 50), (48, 64), (64, 48), (1, 1)}
    assert canvases[48, 90] == (64, 128) and canvases[96, 48] == (128, 64)


PIXELS = np.zeros((48, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("pixels", "memory"),
    [
        (PIXELS, PIXELS.nbytes),
        (PIXELS[::-1], PIXELS.nbytes),
        (np.broadcast_to(np.uint8(0), PIXELS.shape), 1),
    ],
    ids=["pixels", "reversed", "one value"],
)
@pytest.mark.parametrize(("share", "batches"), [(3, 2), (2, 3)])
def test_batches_are_full_if_each_device_may_hold_its_share(
    recorded, pixels, memory, share, batches, monkeypatch
):
    """Two full batches of 3 images on each of two devices, or as many as have room."""
    predictor, model = recorded(batch_size=3)
    image = predictor.prepare(pixels)
    limit = share * (memory + image.canvas.nbytes)
    monkeypatch.setattr(batches_module, "MAX_WAITING_BYTES", limit)
    for _ in predictor.stream((n, image) for n in range(12)):
        pass
    assert len(model.shapes) == batches


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_service_compiles_all_programs_before_the_first_request(recorded, batch_size):
    predictor, model = recorded(batch_size=batch_size, split_partial=True)
    Service(predictor).close()
    sizes = {shape[1:] for shape in model.shapes}
    assert len(sizes) == 2
    rows = {2, 2 * batch_size}
    assert set(model.shapes) == {(count, *size) for count in rows for size in sizes}
