"""Accuracy of pictures in files, whose captions are those of the generated pictures."""

from pathlib import Path

from PIL import Image

from strata.platform.errors import UserError
from strata.training.data.pictures import folder as folders
from strata.training.data.pictures.scenes import by_caption
from strata.training.diffusion.judge import Verdict, accuracy, judge


def every(folder: Path) -> list[tuple[str, int, dict[str, float]]]:
    """Name, number of pictures and accuracy of a folder with `metadata.jsonl`, or of each folder in it that has one."""
    found = (
        [folder]
        if (folder / folders.METADATA).is_file()
        else sorted(path.parent for path in folder.glob(f"*/{folders.METADATA}"))
    )
    if not found:
        fix = f"Name a folder of pictures with {folders.METADATA}, such as 'strata bench dit --captions' writes."
        raise UserError(f"{folder} has no {folders.METADATA}, and no folder with one.", fix)
    judged = [(one.name, [_verdict(each) for each in folders.find(one, "text")]) for one in found]
    return [(name, len(verdicts), accuracy(verdicts)) for name, verdicts in judged]


def _verdict(one: folders.Captioned) -> Verdict:
    if one.caption not in by_caption():
        cause = f"The judge does not know the caption of {one.picture}: {one.caption!r}."
        raise UserError(cause, "Judge pictures of captions that 'strata data make pictures' writes.")
    with Image.open(one.picture) as opened:
        size = min(opened.size)
    return judge(folders.read(one.picture, size), *by_caption()[one.caption])
