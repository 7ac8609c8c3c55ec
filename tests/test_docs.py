"""What the documentation names is there: entries of configs, messages, files, flags."""

import ast
import re
from pathlib import Path

import pytest

from mask_rcnn_jax.configs import coco
from mask_rcnn_jax.prepare import COMMANDS
from mask_rcnn_jax.recipe.entries import flatten

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SECTIONS = "data|model|loss|distill|optim|train|eval"
FILE_ENDINGS = {
    "json",
    "md",
    "py",
    "lock",
    "safetensors",
    "onnx",
    "engine",
    "stablehlo",
    "mlir",
    "vmfb",
    "mnn",
    "ort",
    "pth",
    "yaml",
}


def page_id(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_entry_of_a_config_exists(page):
    entries = coco.get_config()
    named = re.findall(rf"(?<![\w/.])({SECTIONS})\.(\w+)(?![\w/]|\.\w)", page.read_text())
    unknown = {
        f"{section}.{key}"
        for section, key in named
        if key not in entries[section] and key not in FILE_ENDINGS
    }
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_link_to_a_file_leads_somewhere(page):
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in slugs, anchor


def test_every_documented_argument_exists():
    """`mkdocs build --strict` fails otherwise."""
    unknown = []
    for path in sorted((ROOT / "mask_rcnn_jax").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef):
                continue
            section = re.search(r"^Args:\n((?: +.*\n?|\n)+)", ast.get_docstring(node) or "", re.M)
            named = re.findall(r"^    (\S[^:\n]*):", section[1], re.M) if section else []
            taken = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            unknown += [f"{path.name}: {node.name}: {name}" for name in named if name not in taken]
    assert not unknown


def test_the_site_lists_every_page():
    listed = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_getting_started_takes_the_steps_of_own_data():
    """tests/commands/test_walk.py runs those that are marked there."""
    pages = [(ROOT / "docs" / name).read_text() for name in ("own_data.md", "getting_started.md")]
    joined = [re.sub(r"\\\n\s*", "", page) for page in pages]
    walk = "".join(re.findall(r"<!-- walk -->\n```bash\n(.*?)```", joined[0], re.S))
    steps = joined[1].split("## With your own classes")[1].split("```")[1].splitlines()[1:]
    assert [step for step in steps if step not in walk] == [
        "python -m mask_rcnn_jax.infer --workdir runs/mine --input new --output out"
    ]
    assert len(steps) == 5


def test_every_message_of_own_data_is_said_somewhere():
    page = (ROOT / "docs" / "own_data.md").read_text().split("## Error messages")[1]
    source = "".join(path.read_text() for path in sorted((ROOT / "mask_rcnn_jax").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings over several lines
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    assert len(messages) > 10
    assert [message for message in messages if message not in source] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_flag_of_a_command_exists(page):
    """Of `python -m mask_rcnn_jax.<command>`; entries of configs are looked at above."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    for command, rest in re.findall(r"python -m mask_rcnn_jax\.(\w+)([^\n`&]*)", text):
        source = (ROOT / "mask_rcnn_jax" / f"{command}.py").read_text()
        source += (ROOT / "mask_rcnn_jax" / "cli" / "__init__.py").read_text()
        if "processes.define_processes()" in source:
            source += (ROOT / "mask_rcnn_jax" / "cli" / "processes.py").read_text()
        if command == "prepare":
            source += (ROOT / "mask_rcnn_jax" / "cli" / "prepare.py").read_text()
        for flag in re.findall(r"--(\w+)(?![\w.]*\.)", rest):
            assert flag == "config" or f'"{flag}"' in source, f"{command} --{flag}"


def table_rows(page: Path, title: str) -> list[tuple[str, str]]:
    """The cells of the two-column tables below a title."""
    section = re.split(r"^## ", page.read_text(), flags=re.M)
    (text,) = [part for part in section if part.startswith(f"{title}\n")]
    return re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", text, re.M)[1:]


FROM_OTHERS = ROOT / "docs" / "from_others.md"
TITLES = re.findall(r"^## (From .*)$", FROM_OTHERS.read_text(), re.M)
# Every flag of the examples' parsers, and what their scripts add.
FLAGS = {
    "From NVIDIA's TensorFlow 1 example": """
        log_path data_dir checkpoint eval_batch_size eval_after_training eval_samples
        include_groundtruth_in_features global_gradient_clip_ratio init_learning_rate
        warmup_learning_rate finetune_bn l2_weight_decay mode model_dir momentum num_steps_per_eval
        save_checkpoints_steps seed train_batch_size total_steps learning_rate_decay_levels
        learning_rate_steps warmup_steps use_amp use_batched_nms use_custom_box_proposals_op
        use_fake_data use_tf_distributed use_xla training_file_pattern validation_file_pattern
        val_json_file report_frequency allow_xla_at_inference amp xla
    """,
    "From NVIDIA's TensorFlow 2 example": """
        data_dir model_dir backbone_checkpoint eval_file epochs steps_per_epoch eval_samples
        train_batch_size eval_batch_size seed l2_weight_decay init_learning_rate
        learning_rate_values learning_rate_boundaries momentum finetune_bn use_synthetic_data xla
        amp log_file log_every log_warmup_steps log_graph log_tensorboard verbose eagerly gpus
        batch_size no_xla weights_dir slurm_lock no_eval
    """,
}


@pytest.mark.parametrize("title", FLAGS)
def test_every_flag_of_an_example_has_a_row(title):
    named = [
        name for left, _ in table_rows(FROM_OTHERS, title) for name in re.findall(r"`--(\w+)", left)
    ]
    assert sorted(set(named)) == sorted(FLAGS[title].split())


@pytest.mark.parametrize("title", TITLES)
def test_tables_name_entries_and_commands_that_exist(title):
    entries, rows = flatten(coco.get_config()), table_rows(FROM_OTHERS, title)
    assert rows
    for left, right in rows:
        named = re.findall(rf"`((?:{SECTIONS})\.[\w.]+)", right)
        assert [name for name in named if name not in entries] == [], left
        called = re.findall(
            r"`(train|evaluate|infer|prune|export|benchmark|prepare)\b ?(\w*)", right
        )
        for command, action in called:
            assert (ROOT / "mask_rcnn_jax" / f"{command}.py").is_file()
            assert command != "prepare" or action in COMMANDS, left
        said = r"none|always|not needed|not available|counted from|`--|CUDA_VISIBLE_DEVICES"
        assert named or called or re.search(said, right), left
