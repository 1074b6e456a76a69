"""The arguments of `DistributedOptimizer` that outlive a reducer: new ranks need a new one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.step_counters import Stepper
from sirtaki.common.averaging import fixed_divisor, gradient_sum
from sirtaki.common.groups import Groups
from sirtaki.common.ops import Reduction
from sirtaki.common.shares import current_share
from sirtaki.torch.consistency import round_checks
from sirtaki.torch.device import warn_if_crowded
from sirtaki.torch.exchange_options import ExchangeOptions
from sirtaki.torch.listed_parameters import ListedParameters, inherited_groups, inherited_names
from sirtaki.torch.loss_scale import LossScale
from sirtaki.torch.overlap import least_early_bytes
from sirtaki.torch.parameters import exchanged
from sirtaki.torch.reducer import GradientReducer, Nesting
from sirtaki.torch.tensors import reducible_view
from sirtaki.torch.wrapping import Optimizer

_NEWS_BYTES = 128  # for each gradient, and for a round, at the most


@dataclass
class ReducerSettings:
    """The arguments for a reducer of the parameters that the optimizer has at the time."""

    exchange_options: ExchangeOptions
    names: dict[Tensor, str]
    groups: Groups
    passes: int
    shard: str | None = None
    skips: Nesting = field(default_factory=Nesting)
    no_sync: Nesting = field(default_factory=Nesting)
    loss_scale: LossScale = field(default_factory=LossScale)
    has_whole_losses: bool = False  # whether a loss is read as that of all ranks, as under `hvdrun --auto`
    checks_data: bool = True  # whether the ranks' gradients are compared, to find ranks with the same data

    def reducer(self, optimizer: Optimizer) -> GradientReducer:
        """Returns a reducer for all parameters of the optimizer; for none if there is no peer."""
        scope, how = self.exchange_options.scope, self.exchange_options.how
        reduced = self.reduction()
        prefix, is_alone = f"{scope.name}.", scope.has_no_peers and reduced == how
        found = [] if is_alone else exchanged(optimizer, self.names, self.groups, prefix)
        views = [reducible_view(parameter, name) for name, parameter, _ in found]
        if any(view.device >= 0 for view in views):
            warn_if_crowded(scope.context.topology)
        first = 2 if self.shard is None else 1  # the first step makes different parameters equal
        checks = round_checks(
            scope,
            found,
            optimizer,
            checks_data=self.checks_data,
            first_check=first,
            loss_scale=self.loss_scale,
            marks=len(found),
        )
        reducer = GradientReducer(replace(self.exchange_options, how=reduced), found, checks, self.passes)
        reducer.no_sync = self.no_sync
        reducer.weighting.op = how.op
        if share := current_share():
            reducer.weighting.count_by_rows(share)
        return reducer

    def reduction(self) -> Reduction:
        """Returns the combination of gradients in the present world."""
        context, how = self.exchange_options.scope.context, self.exchange_options.how
        return how if context.is_provisional else gradient_sum(how, fixed_divisor(context))

    def stepper(self, optimizer: Optimizer) -> Stepper:
        """Returns the optimizer, as autotune knows it: with all gradients, and the news that go with them.

        News are the numbers and marks of `RoundChecks`.
        """
        scope = self.exchange_options.scope
        found = [one.parameter for one in exchanged(optimizer, self.names, self.groups, f"{scope.name}.")]
        size = sum(one.numel() * one.element_size() for one in found)
        return Stepper(
            str(scope.name),
            hands_over=True,
            operations=len(found) + 1 if self.shard is None else 0,
            bytes=size + _NEWS_BYTES * (len(found) + 1),
            parts=size // least_early_bytes(self.exchange_options.overlaps_forward) + 1,
        )

    def follow(self, earlier: ListedParameters, present: ListedParameters) -> None:
        """Prepares for a reducer of parameters that the program has put into the groups itself.

        Those that are gone are forgotten.

        Raises:
            UnsupportedError: the optimizer's state is in slices of the parameters that it had.
        """
        if self.shard is not None:
            raise UnsupportedError(
                "the program has put a parameter into the optimizer's param_groups, and with shard= state is "
                "kept in slices of those that it had: call add_param_group, or make a new optimizer of the "
                "new parameters and wrap that"
            )
        heirs = present.heirs_of(earlier)
        self.names = inherited_names(self.names, heirs, present)
        self.groups = inherited_groups(self.groups, heirs, present)
        if self.exchange_options.memory is not None:
            self.exchange_options.memory.keep(present)

    def move_to(self, context: Context) -> None:
        """Changes the world for which the next reducer is made."""
        was_alone = self.exchange_options.scope.has_no_peers
        self.checks_data = self.checks_data and was_alone  # one world's answer counts for all
        self.exchange_options = self.exchange_options.in_world(context)
