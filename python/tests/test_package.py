"""The package itself: its version, its types, its documents."""

import ast
import re
from importlib import metadata, resources
from pathlib import Path

import pytest

import echelon


def test_version(root):
    version = re.search(r"project\(echelon VERSION (\S+)", (root / "CMakeLists.txt").read_text())[1]
    assert echelon.__version__ == version
    try:
        installed = metadata.version("echelon")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only on the path")
    assert installed == version


def test_is_typed():
    files = resources.files(echelon)
    assert files.joinpath("py.typed").is_file()
    stub = ast.parse(files.joinpath("_core.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    public = {name for name in echelon.__all__ if isinstance(getattr(echelon, name), type)}
    assert public & set(dir(echelon._core)) <= set(classes)
    best = next(node for node in classes["PlannedStep"].body if getattr(node, "name", "") == "step_seconds")
    assert ast.unparse(best.returns) == "float"
    arguments = ast.parse(files.joinpath("_arguments.py").read_text())
    named = {node.name: {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
             for node in arguments.body if isinstance(node, ast.ClassDef)}  # fmt: skip
    assert named["PlanArguments"] == {one.name for one in echelon.arguments("plan")}
    assert named["TrainArguments"] == {one.name for one in echelon.arguments("train")} - {"data"}


def test_types_check(tmp_path):
    """mypy --strict finds nothing in right use, and what is wrong in wrong use."""
    api = pytest.importorskip("mypy.api")
    (tmp_path / "right.py").write_text(
        "import echelon\n"
        "answer = echelon.plan(model=echelon.Model('llama-3-8b'), gpus=8, sp=True, objective='time')\n"
        "seconds: float = answer.plans[0].step_seconds\n"
        "count: int = answer.to_dict()['considered']\n"
        "def show(record: echelon.StepRecord) -> None:\n"
        "    print(record.loss, record.experts[0].tokens)\n"
        "echelon.train('text', from_='weights', steps=3, on_step=show)\n"
        "echelon.train('text', on_evaluation=lambda one: print(one[0] + 1, one[1] / 2))\n"
        "peaks: list[float] = echelon.simulate('1f1b', pp=4, times=(1, 1, 1)).peak_activations\n"
        "from pathlib import Path\n"
        "model = echelon.Model(Path('mine.toml'))\n"
        "echelon.draw(echelon.simulate(Path('rows.txt'), pp=4)).to_svg()\n"
        "import numpy as np\n"
        "echelon.simulate('1f1b', pp=np.int64(4), times=np.ones(3), comm_time=np.float32(0.5))\n"
        "echelon.plan(gpus=np.int64(8), sp=np.bool_(True), tokens=10**12)\n"
        "checkpoint = echelon.open_checkpoint('runs/first')\n"
        "step: int = checkpoint.step + len(checkpoint)\n"
        "name: str = checkpoint.model.name + checkpoint.tensor('a').dtype\n"
        "tensors: echelon.Tensors = checkpoint\n"
        "echelon.generate(checkpoint, prompt_tokens=[1, 2, 3], stop=['.', '!'])\n"
        "best = answer.best\n"
        "assert best is not None\n"
        "more: int = best.plan.tp + 1\n"
        "words: str = best.plan.schedule.upper()\n"
    )
    (tmp_path / "wrong.py").write_text(
        "import echelon\n"
        "echelon.plan(gpus='many')\n"
        "echelon.plan(gpuz=3)\n"
        "echelon.plan(objective='fame')\n"
        "answer: str = echelon.plan(gpus=8).best\n"
        "echelon.open_checkpoint('runs/first').stepp\n"
        "echelon.generate('runs/first', prompt_tokens=2.5)\n"
        "words: str = echelon.Plan.from_toml('').tp\n"
        "echelon.Plan.from_toml('').tq\n"
    )
    cache = ["--cache-dir", str(tmp_path / "cache")]
    out, _, status = api.run(["--strict", *cache, str(tmp_path / "right.py")])
    assert status == 0, out
    out, _, status = api.run(["--strict", *cache, str(tmp_path / "wrong.py")])
    assert [int(line) for line in re.findall(r"wrong.py:(\d+): error", out)] == list(range(2, 10)), out


def test_everything_public_is_there_and_told():
    for name in echelon.__all__:
        assert getattr(echelon, name, None) is not None, name
        if name != "__version__":
            assert getattr(echelon, name).__doc__, name


def test_the_documents_examples_run(root, tmp_path, monkeypatch):
    """The blocks of docs/python.md, one after another, in a directory with a text as the README has it."""
    monkeypatch.chdir(tmp_path)
    Path("bible.txt").write_text("In the beginning God created the heaven and the earth.\n" * 300)
    blocks = re.findall(r"```python\n(.*?)```", (root / "docs/python.md").read_text(), re.DOTALL)
    assert len(blocks) > 5
    names = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)


def test_the_notebook_runs(root, tmp_path, monkeypatch):
    import json

    monkeypatch.chdir(tmp_path)
    Path("bible.txt").write_text("In the beginning God created the heaven and the earth.\n" * 300)
    notebook = json.loads((root / "examples/python/first_steps.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) == 10
    names, shown = {}, 0
    for cell in cells:
        tree = ast.parse(cell)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "first_steps.ipynb", "exec"), names)
        if last is None:
            continue
        value = eval(compile(ast.Expression(last.value), "first_steps.ipynb", "eval"), names)
        for show in ("_repr_html_", "_repr_svg_"):
            if hasattr(value, show):
                assert "<" in getattr(value, show)()
                shown += 1
                break
    assert shown >= 3
