"""Ranks and micro-batches of the calls of a dataflow."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from headway.contracts.config.ppo_code import VerifiedPPOExperiment
from headway.contracts.config.rollout_experiments import PolicyLearner
from headway.contracts.errors import ConfigError
from trainer.api import MicroBatchSpec
from trainer.dataflow.call import Call
from trainer.dataflow.policy import POLICY, REFERENCE, REWARD

Ranks = tuple[int, ...]


class Allocations:
    """What `dataflow.allocations` says of each call and of each model."""

    def __init__(self, config: PolicyLearner, calls: Sequence[Call], world_size: int) -> None:
        """
        Raises:
            ConfigError: a name that is no call's, ranks that there are not, or that do not fit together.
        """
        self._given = config.dataflow.allocations
        self._max_tokens = config.trainer.max_tokens_per_mb
        self._everyone = tuple(range(world_size))
        for name in self._given:
            _refuse_unknown(name, [call.name for call in calls])
        self._of_call = {call.name: self._named(call) for call in calls}
        """Ranks of each call."""
        self._of_model = self._models(calls)
        self._check(config)

    @property
    def are_split(self) -> bool:
        """True if some model is not on all ranks."""
        return any(ranks != self._everyone for ranks in self._of_model.values())

    def ranks_of_calls(self) -> dict[str, frozenset[int]]:
        """Call -> its ranks."""
        return {name: frozenset(ranks) for name, ranks in self._of_call.items()}

    def ranks_of_model(self, model: str | None) -> Ranks:
        """Return the ranks that hold a model; all of them for calls without one."""
        return self._of_model.get(model or "", self._everyone)

    def mb_spec_of(self, call: Call) -> MicroBatchSpec:
        """Return the limits of a call's micro-batches."""
        given = self._given.get(call.name)
        if given is None:
            return MicroBatchSpec(self._max_tokens)
        limit = given.mb_spec.max_tokens_per_mb
        return MicroBatchSpec(limit or self._max_tokens, given.mb_spec.n_mbs)

    def _named(self, call: Call) -> Ranks:
        given = self._given.get(call.name)
        if given is None or given.ranks is None:
            return self._everyone
        if call.kind == "generate":
            raise ConfigError(
                f"dataflow.allocations.{call.name}.ranks: the rollout service generates; set "
                "num_servers, or start servers where they shall run"
            )
        if call.model is None:
            raise ConfigError(
                f"dataflow.allocations.{call.name}.ranks: this call asks no model of the trainer; leave "
                "them out"
            )
        if given.ranks[-1] >= len(self._everyone):
            raise ConfigError(
                f"dataflow.allocations.{call.name}.ranks={list(given.ranks)}, and the trainer has "
                f"{len(self._everyone)} ranks, counted from 0; start more, or name others"
            )
        return given.ranks

    def _models(self, calls: Sequence[Call]) -> dict[str, Ranks]:
        models: dict[str, tuple[str, Ranks]] = {}
        for call in calls:
            if call.model is None or call.kind == "generate":
                continue
            ranks = self._of_call[call.name]
            first, known = models.setdefault(call.model, (call.name, ranks))
            if known != ranks:
                raise ConfigError(
                    f"{first} runs on ranks {list(known)} and {call.name} on {list(ranks)}, and both ask "
                    f"the model {call.model!r}, which is held once; give both calls the same ranks"
                )
        return {model: ranks for model, (_, ranks) in models.items()}

    def _check(self, config: PolicyLearner) -> None:
        if not self.are_split:
            return
        ranks = self.ranks_of_model
        if ranks(POLICY)[0] != 0:
            raise ConfigError(
                f"the policy is on ranks {list(ranks(POLICY))}; rank 0 publishes it: name 0 as well"
            )
        if config.trainer.shard_size is not None:
            raise ConfigError(
                "trainer.shard_size cuts all ranks into rows, and dataflow.allocations puts models on "
                "some of them; leave one out"
            )
        if config.reference.ema_eta is not None and ranks(REFERENCE) != ranks(POLICY):
            raise ConfigError(
                f"the reference on ranks {list(ranks(REFERENCE))} follows the policy on "
                f"{list(ranks(POLICY))}; give both the same ranks, or leave out ema_eta"
            )
        asks_both = isinstance(config, VerifiedPPOExperiment) and config.ppo.reward_source == "both"
        if asks_both and ranks(REWARD)[0] != 0:
            raise ConfigError(
                f"rew_inf runs on ranks {list(ranks(REWARD))} and also asks the verifier, as only rank 0 "
                "can; name 0 as well"
            )


def _refuse_unknown(name: str, calls: Sequence[str]) -> None:
    if name in calls:
        return
    near = difflib.get_close_matches(name, calls, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"its calls are {', '.join(calls)}"
    raise ConfigError(
        f"dataflow.allocations names {name!r}, which is no call of this experiment; {hint}"
    )
