"""Patch pipelining (PipeFusion): blocks are split into stages, and patches of the picture pass through them one after another.

A patch is a number of whole rows of tokens; text that takes part in self-attention travels with the first patch. A stage attends
to the keys and values of all tokens: those of the patches that it has not yet computed in this step are the previous step's. The
first steps (`warm_up`) pass the whole picture through the stages and are exact. The last stage takes the scheduler's step of each
patch and sends it to the first stage, which starts the next step with it while other patches are still on their way."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strata.platform.errors import UserError
from strata.serving.diffusion.attention import Site, attention
from strata.serving.diffusion.denoiser import Denoiser
from strata.serving.diffusion.families import Modulation, Tokens
from strata.serving.diffusion.parallel.group import Group
from strata.serving.diffusion.parallel.sequence import share, shares


@dataclass(frozen=True)
class Patch:
    """A range of token rows, and the text or none of it."""

    rows: slice
    image: slice  # tokens
    text: slice


class KeyValueBuffer:
    """Attention of one patch to the keys and values of the whole picture, which are this step's or the previous one's."""

    def __init__(self, image: int, text: int, text_first: bool) -> None:
        self.image, self.text, self.text_first = image, text, text_first
        self.buffers: dict[str, Tensor] = {}  # by module: [2, b, image + text, heads, dim]; the first call fills them
        self.patch: Patch | None = None  # that the present call computes

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, site: Site, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert self.patch is not None
        tokens = self.image + (self.text if site.joint else 0)
        buffer = self.buffers.get(site.name)
        if buffer is None:
            buffer = self.buffers[site.name] = k.new_empty(2, len(k), tokens, *k.shape[2:])
        parts = [self.patch.image]
        if site.joint:
            text = slice(self.image + self.patch.text.start, self.image + self.patch.text.stop)
            parts = [text, *parts] if self.text_first else [*parts, text]
        at = 0
        for part in parts:
            size = part.stop - part.start
            buffer[0, :, part], buffer[1, :, part] = k[:, at : at + size], v[:, at : at + size]
            at += size
        assert at == k.shape[1]
        return attention(q, buffer[0], buffer[1])[0]


class Stage:
    """This worker's blocks and its neighbours."""

    def __init__(self, denoiser: Denoiser, workers: Group) -> None:
        self.denoiser, self.axis, self.back = denoiser, workers.stages, workers.back
        self.first, self.last = self.axis.index == 0, self.axis.index == self.axis.size - 1
        blocks = denoiser.family.blocks(denoiser.model)
        self.blocks = blocks[share(len(blocks), self.axis)]
        self.attend = KeyValueBuffer(denoiser.image, denoiser.text, denoiser.family.text_first)
        self.sends: list[tuple[Any, Tensor]] = []  # with the tensors, which must live until they have left

    def run(self, patch: Patch, latents: Tensor, modulation: Modulation) -> Tensor | None:
        """One patch through this stage's blocks. `latents` are those of the whole picture, scaled, on the first stage. The last
        stage returns the guided prediction of the patch's rows, [b, channels, height, width]."""
        denoiser = self.denoiser
        inputs = modulation.of_tokens(patch.image, patch.text)
        tokens = denoiser.tokens(latents, patch.image, patch.text) if self.first else self._receive(patch)
        self.attend.patch = patch
        with denoiser.pipeline.seam.using(self.attend):
            for block in self.blocks:
                tokens = denoiser.family.block(block, tokens, inputs)
        if not self.last:
            self._send(tokens)
            return None
        values = denoiser.combine(denoiser.family.head(denoiser.model, tokens.image, inputs))
        return denoiser.family.latents(denoiser.model, values, denoiser.grid[1])

    def _send(self, tokens: Tokens) -> None:
        message = tokens.image if tokens.text is None else torch.cat((tokens.text, tokens.image), dim=1)
        self.send(message, self.axis.ranks[self.axis.index + 1], self.axis.group)

    def _receive(self, patch: Patch) -> Tokens:
        model, denoiser = self.denoiser.model, self.denoiser
        text, image = patch.text.stop - patch.text.start, patch.image.stop - patch.image.start
        rows = len(denoiser.batch.scale) * denoiser.passes
        message = torch.empty(rows, text + image, model.inner_dim, dtype=model.dtype, device=model.device)
        dist.recv(message, self.axis.ranks[self.axis.index - 1], group=self.axis.group)
        has_text = denoiser.family.joint_text
        return Tokens(message[:, text:], message[:, :text] if has_text else None)

    def send(self, message: Tensor, to: int, group: Any) -> None:
        message = message.contiguous()
        self.sends.append((dist.isend(message, to, group=group), message))

    def finish_sends(self, latest: int = 0) -> None:
        """Wait for all sends but the `latest`."""
        done = len(self.sends) - latest
        for request, _ in self.sends[: max(done, 0)]:
            request.wait()
        self.sends = self.sends[max(done, 0) :]


class PatchPipeline:
    """Steps of one sampling call over stages. Every stage has the latents of the whole picture; those of the first and the last
    stage are in use."""

    def __init__(self, denoiser: Denoiser, scheduler: Any, latents: Tensor, workers: Group) -> None:
        check_scheduler(scheduler)
        self.latents, self.workers = latents, workers
        self.fresh = scheduler  # without a state; the bands' copies have one each
        rows, columns = denoiser.grid
        self.height = latents.shape[2] // rows  # latent pixels of a row of tokens
        self.patches: list[Patch] = []
        start = 0
        for i, size in enumerate(shares(rows, workers.layout.pipeline_patches)):
            text = slice(0, denoiser.text if i == 0 else 0)
            stop = start + size
            self.patches.append(Patch(slice(start, stop), slice(start * columns, stop * columns), text))
            start = stop
        self.whole = Patch(slice(0, rows), slice(0, rows * columns), slice(0, denoiser.text))
        self.schedulers = [copy.deepcopy(scheduler) for _ in self.patches]
        self.stage = Stage(denoiser, workers)

    def exact_step(self, timestep: Tensor) -> None:
        """The whole picture through all stages; all of them then have its new latents."""
        stage = self.stage
        prediction = stage.run(self.whole, self._scaled(timestep), stage.denoiser.modulation(timestep))
        if prediction is not None:
            for index, patch in enumerate(self.patches):
                self._advance(index, prediction[:, :, self._pixels(patch)], timestep)
        stage.finish_sends()
        self.share_latents()

    def patch_step(self, timestep: Tensor, follows_patches: bool) -> None:
        """All patches, one after another. `follows_patches`: the last step's latents are still on their way to the first
        stage."""
        stage = self.stage
        modulation = stage.denoiser.modulation(timestep)
        stage.finish_sends(latest=len(self.patches))  # the last step's may still be on their way
        for index, patch in enumerate(self.patches):
            if follows_patches and stage.first:
                self._receive(patch)
            prediction = stage.run(patch, self._scaled(timestep), modulation)
            if prediction is not None:
                self._advance(index, prediction, timestep)
                stage.send(self.latents[:, :, self._pixels(patch)], stage.axis.ranks[0], stage.back.group)

    def drain(self) -> None:
        """Receive the patches of a step that no further step follows, so that no message is left for the next call."""
        if self.stage.first:
            for patch in self.patches:
                self._receive(patch)
        self.stage.finish_sends()

    def share_latents(self) -> None:
        self.latents = self.latents.contiguous()
        dist.broadcast(self.latents, self.workers.stages.ranks[-1], group=self.workers.stages.group)

    def _scaled(self, timestep: Tensor) -> Tensor:
        """Latents as the model takes them. The scheduler finds the step by its timestep as long as it has no state."""
        if not hasattr(self.fresh, "init_noise_sigma"):
            return self.latents
        return copy.copy(self.fresh).scale_model_input(self.latents, timestep)  # type: ignore[no-any-return]

    def _advance(self, index: int, prediction: Tensor, timestep: Tensor) -> None:
        pixels = self._pixels(self.patches[index])
        before = self.latents[:, :, pixels]
        self.latents[:, :, pixels] = self.schedulers[index].step(prediction, timestep, before, return_dict=False)[0]

    def _receive(self, patch: Patch) -> None:
        pixels = self._pixels(patch)
        rows = torch.empty_like(self.latents[:, :, pixels], memory_format=torch.contiguous_format)
        dist.recv(rows, self.stage.axis.ranks[-1], group=self.stage.back.group)
        self.latents[:, :, pixels] = rows

    def _pixels(self, patch: Patch) -> slice:
        return slice(patch.rows.start * self.height, patch.rows.stop * self.height)


def check_scheduler(scheduler: Any) -> None:
    """Refuse schedulers whose step of a patch is not the patch of their step."""
    config = scheduler.config
    if config.get("thresholding") or config.get("stochastic_sampling") or "sde" in str(config.get("algorithm_type", "")):
        raise UserError(
            f"PipeFusion steps patches by themselves, which this {type(scheduler).__name__} does not allow: it adds noise or "
            "thresholds the whole picture.",
            "Use another layout, or a deterministic scheduler.",
        )
