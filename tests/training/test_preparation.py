"""Refusal of data that the recipe's loss is not for."""

import pytest

from strata.platform.errors import UserError
from strata.platform.recipe import PreferenceLoss, PreferenceSection
from strata.training.data.finetuning.store import Objective
from strata.training.preparation import require_fitting_loss


@pytest.mark.parametrize(
    ("objective", "loss", "fix"),
    [
        ("tokens", None, None),
        ("pairs", "dpo", None),
        ("pairs", "kto", None),
        ("labels", "kto", None),
        ("tokens", "kto", "Set data.kind=preference."),
        ("pairs", None, "Set train.preference.loss, such as dpo."),
        ("labels", None, "Set train.preference.loss, such as kto."),
        ("labels", "dpo", "Set train.preference.loss=kto, or use rows with 'chosen' and 'rejected'."),
        ("labels", "simpo", "Set train.preference.loss=kto, or use rows with 'chosen' and 'rejected'."),
    ],
)
def test_loss_fits_the_data(objective: Objective, loss: PreferenceLoss | None, fix: str | None) -> None:
    section = PreferenceSection(loss=loss) if loss else None
    if fix is None:
        require_fitting_loss(objective, section)
        return
    with pytest.raises(UserError) as raised:
        require_fitting_loss(objective, section)
    assert raised.value.fix == fix
