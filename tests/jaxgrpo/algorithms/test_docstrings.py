"""Every public function of the algorithms carries an example, and the example is true."""

import doctest
import inspect
from types import ModuleType

import pytest

from jaxgrpo import optimizer
from jaxgrpo.algorithms import advantages, backups, episode_sampling, etpo, group_filter, objectives, ppo, twosome


def _public_functions(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


_CASES = [
    pytest.param(module, name, id=name)
    for module in (advantages, backups, episode_sampling, etpo, group_filter, objectives, ppo, twosome)
    for name in [*_public_functions(module), *(["EpisodeSample"] if module is episode_sampling else [])]
] + [pytest.param(optimizer, name, id=name) for name in ("polyak", "within_target_kl")]


@pytest.mark.parametrize(("module", "name"), _CASES)
def test_example_is_true(module, name, capsys):
    # By object, not by module: the run-time shape checks wrap functions, and doctest would take them for foreign ones.
    found = doctest.DocTestFinder().find(getattr(module, name), name, module=False, globs=dict(vars(module)))
    runner = doctest.DocTestRunner()
    for case in found:
        runner.run(case)
    assert runner.tries > 0, f"{name} has no example"
    assert runner.failures == 0, capsys.readouterr().out


def test_all_public_functions_are_covered():
    assert {case.id for case in _CASES} == {
        "group_advantages",
        "state_advantages",
        "rewards_to_go",
        "groups_to_keep",
        "sample_episodes",
        "EpisodeSample",
        "clipped_surrogate",
        "kl_k3",
        "truncated_weight",
        "row_weights",
        "backup",
        "soft_value",
        "targets",
        "critic_loss",
        "policy_loss",
        "polyak",
        "released_targets",
        "released_critic_loss",
        "released_policy_loss",
        "token_advantages",
        "reply_advantages",
        "normalised",
        "kl_penalty",
        "reply_log_prob",
        "clipped_value_loss",
        "within_target_kl",
        "action_log_probs",
    }
