from strata.platform import recipe_file
from strata.training.engine import deepspeed_config, parameter_groups
from strata.training.model.llama import Llama


def test_accumulation_times_micro_batch_is_the_batch() -> None:
    recipe = recipe_file.load("laptop", ["train.batch=24", "train.micro_batch=2", "parallel.workers=3"])
    config = deepspeed_config(recipe.model, recipe.train, recipe.parallel)
    assert config["gradient_accumulation_steps"] == 4
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 3 == 24


def test_only_the_layers_matrices_decay() -> None:
    recipe = recipe_file.load("laptop", ["model.layers=1"])
    model = Llama(recipe.model)
    matrices, tables, norms = parameter_groups(model.named_parameters(), recipe.train)
    assert matrices["weight_decay"] == recipe.train.weight_decay and len(matrices["params"]) == 7
    assert tables["weight_decay"] == norms["weight_decay"] == 0.0
    assert tables["ratio"] == recipe.train.embedding_lr_ratio
    assert sum(len(group["params"]) for group in (matrices, tables, norms)) == len(list(model.parameters()))
