"""Layouts of a diffusion transformer over workers, and the rules that a model and a picture put on them.

The planner, the recipe check and the sampler share these rules. They are plain arithmetic: no torch.
"""

from dataclasses import dataclass

from strata.platform.errors import UserError

WARM_UP = 2  # exact steps before PipeFusion uses keys and values of the previous step


@dataclass(frozen=True)
class PictureLayout:
    """Degrees of parallelism of one picture. Their product is the number of workers.

    `ulysses` splits heads during attention, `ring` rotates keys and values; both split the tokens. `cfg` computes the two passes
    of classifier-free guidance side by side. `pipefusion` splits the blocks into stages, through which `patches` patches of the
    picture pass one after another; 0: as many patches as stages.
    """

    ulysses: int = 1
    ring: int = 1
    cfg: int = 1
    pipefusion: int = 1
    patches: int = 0

    @property
    def sequence(self) -> int:
        """Workers among which the tokens are split."""
        return self.ulysses * self.ring

    @property
    def workers(self) -> int:
        return self.sequence * self.cfg * self.pipefusion

    @property
    def pipeline_patches(self) -> int:
        return 1 if self.pipefusion == 1 else self.patches or self.pipefusion

    def name(self) -> str:
        degrees = {"cfg": self.cfg, "pipefusion": self.pipefusion, "ulysses": self.ulysses, "ring": self.ring}
        return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one worker"


@dataclass(frozen=True)
class Splittable:
    """Figures of a model and a picture that decide which layouts exist. `two_passes`: guidance runs the model twice per step."""

    heads: int
    blocks: int
    tokens: int  # of the picture, without text
    two_passes: bool


def obstacles(layout: PictureLayout, of: Splittable) -> list[str]:
    """Reasons why the layout does not work, empty if it does."""
    degrees = {"ulysses": layout.ulysses, "ring": layout.ring, "cfg": layout.cfg, "pipefusion": layout.pipefusion}
    found = [f"{name}={degree} is below 1" for name, degree in degrees.items() if degree < 1]
    if layout.patches < 0:
        found.append(f"patches={layout.patches} is below 0")
    if found:
        return found
    if layout.cfg > 2:
        found.append(f"cfg={layout.cfg}: guidance has two passes")
    elif layout.cfg == 2 and not of.two_passes:
        found.append("cfg=2: this model or request has no second pass (guidance off, or distilled into the model)")
    if of.heads % layout.ulysses:
        found.append(f"ulysses={layout.ulysses} does not divide the {of.heads} heads")
    if layout.sequence > of.tokens:
        found.append(f"ulysses x ring = {layout.sequence} exceeds the {of.tokens} tokens of the picture")
    if layout.pipefusion > of.blocks:
        found.append(f"pipefusion={layout.pipefusion} exceeds the {of.blocks} blocks")
    if layout.pipefusion > 1 and layout.sequence > 1:
        found.append("pipefusion is combined with cfg only, not with ulysses or ring")
    if layout.patches and layout.pipefusion == 1:
        found.append(f"patches={layout.patches} needs pipefusion above 1")
    if layout.pipeline_patches > of.tokens:
        found.append(f"{layout.pipeline_patches} patches exceed the {of.tokens} tokens of the picture")
    return found


def check(layout: PictureLayout, of: Splittable) -> None:
    """Raise a `UserError` with the first obstacle."""
    if found := obstacles(layout, of):
        raise UserError(f"The layout {layout.name()} does not work: {found[0]}.", "Change this degree, or use one worker.")


def layouts(workers: int, of: Splittable) -> list[PictureLayout]:
    """Every layout that works on exactly this number of workers."""
    found = []
    for cfg in (1, 2):
        for pipefusion in divisors(workers // cfg) if workers % cfg == 0 else []:
            for ulysses in divisors(workers // cfg // pipefusion):
                layout = PictureLayout(ulysses, workers // cfg // pipefusion // ulysses, cfg, pipefusion)
                if not obstacles(layout, of):
                    found.append(layout)
    return found


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
