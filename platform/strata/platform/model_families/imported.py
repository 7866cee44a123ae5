"""Model section of a recipe that imports a model: its config.json decides everything but the training context."""

from typing import Any

from strata.platform.errors import UserError, shown
from strata.platform.model_families import registry, source
from strata.platform.recipe import ModelSection

Tree = dict[str, Any]

DEFAULT_CONTEXT = 4096  # longer ones need more memory than most runs have; models allow up to 131,072


def resolve(model: Tree) -> Tree:
    """Section with the model's own values in place of the recipe's, which decides only `context` and `moe.balance`."""
    given = model["from"]
    if not isinstance(given, str):
        raise UserError(f"model.from={shown(repr(given))} is not text.", "Give a model's folder, or its id on Hugging Face.")
    folder = source.local(given)
    where = str(folder or given)
    family, config = registry.answering(source.read_config(given), where)
    section = family.section(config)
    longest = config.whole("max_position_embeddings")
    context = model.get("context")
    if context is None:
        context = min(longest, DEFAULT_CONTEXT)
    elif isinstance(context, int) and context > longest:
        cause = f"model.context={context} exceeds max_position_embeddings={longest} in the config.json of {where}."
        raise UserError(cause, f"Lower it to at most {longest}.")
    if section["moe"] is not None and isinstance(moe := model.get("moe"), dict) and "balance" in moe:
        section["moe"] |= {"balance": moe["balance"]}
    return {"from": where, "family": family.name, "context": context} | section


def teacher(distill: str, context: int) -> ModelSection:
    """Section of the model in `train.distill`, for rows of `context` tokens. Refuses a model whose own context is shorter."""
    source.local(distill, "train.distill")  # its errors name the key
    return ModelSection(**resolve({"from": distill, "context": context}))
