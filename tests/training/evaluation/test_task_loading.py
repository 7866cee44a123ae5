"""Tasks by name and from files, with errors that name the cause."""

from pathlib import Path
from typing import Any

import pytest

from strata.platform.errors import UserError

pytest.importorskip("lm_eval")

from strata.training.evaluation import task_loading


@pytest.fixture(autouse=True)
def few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The harness's own tasks are two files here. Returns for each index whether it has them."""
    real, built = task_loading.TaskManager, list[bool]()
    folder = tmp_path / "harness"
    folder.mkdir()
    (folder / "tasks.yaml").write_text("task: hellaswag\ndataset_path: Rowan/hellaswag\n")
    (folder / "more.yaml").write_text("task: arc_easy\ndataset_path: allenai/ai2_arc\n")

    def manager(include_path: list[str], include_defaults: bool = True) -> Any:
        built.append(include_defaults)
        return real(include_path=[*([str(folder)] if include_defaults else []), *include_path], include_defaults=False)

    monkeypatch.setattr(task_loading, "TaskManager", manager)
    return built


def test_own_tasks_do_not_read_those_of_the_harness(own_task: Path, few_tasks: list[bool]) -> None:
    assert set(task_loading.load(["python_lines", "words"], [own_task])["tasks"]) == {"python_lines", "words"}
    assert set(task_loading.load([str(own_task / "words.yaml")], [])["tasks"]) == {"words"}
    assert few_tasks == [False, False]


def test_unknown_task_has_the_nearest_names(own_task: Path, few_tasks: list[bool]) -> None:
    with pytest.raises(UserError) as caught:
        task_loading.load(["words", "helaswag"], [own_task])
    assert caught.value.cause == "There is no task 'helaswag'." and "Did you mean 'hellaswag'?" in caught.value.fix
    assert few_tasks == [False, True]
    with pytest.raises(UserError) as caught:
        task_loading.load(["zzz"], [])
    assert "Did you mean" not in caught.value.fix and "--include" in caught.value.fix


def test_task_of_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        task_loading.load(["hellaswag"], [])
    assert "'hellaswag' needs a dataset from Hugging Face's hub" in caught.value.cause and "python_lines" in caught.value.fix


def test_missing_dataset_file(own_task: Path) -> None:
    (own_task / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"Task 'words' cannot be loaded: .*rows\.jsonl"):
        task_loading.load(["words"], [own_task])


def test_include_that_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--include .*missing is not a folder"):
        task_loading.load(["python_lines"], [tmp_path / "missing"])


def test_file_that_the_harness_skips_has_its_reason(own_task: Path) -> None:
    (own_task / "broken.yaml").write_text("task: broken\n  bad: [\n")
    with pytest.raises(UserError, match=r"broken\.yaml' cannot be loaded: \w*Error"):
        task_loading.load(["broken"], [own_task])
    with pytest.raises(UserError, match=r"broken\.yaml' cannot be loaded"):
        task_loading.load([str(own_task / "broken.yaml")], [])


def test_task_named_twice(own_task: Path) -> None:
    with pytest.raises(UserError, match="Task 'words' is named twice"):
        task_loading.load(["words", str(own_task / "words.yaml")], [own_task])


@pytest.mark.parametrize(
    ("line", "text"), [("unsafe_code: true", "runs code that the model writes"), ("doc_to_image: [x]", "images or sound")]
)
def test_tasks_that_are_refused(own_task: Path, line: str, text: str) -> None:
    path = own_task / "words.yaml"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UserError, match=text):
        task_loading.load(["words"], [own_task])
