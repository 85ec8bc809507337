"""Which process groups does a model use? `RoleGroups` holds megatron's groups of one layout; `active` puts them in force.

Megatron keeps its process groups in module globals that are read in about 80 places. Roles may have layouts of their own on the
same ranks, so each distinct layout has a snapshot of those globals (and of the RNG tracker's states), and `with groups.active():`
is the only way to touch a model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import random as mrandom

from megappo.parallel_state.layout import ParallelLayout
from megappo.parallel_state.mcore_compat import only_known


def _globals() -> dict[str, Any]:
    return {name: value for name, value in vars(mpu).items() if name.startswith("_") and name[1:].isupper()}


class RoleGroups:
    """Megatron's process groups for one layout. All ranks create theirs in the same order (`create_role_groups`)."""

    _in_force: ClassVar[RoleGroups | None] = None
    _pristine: ClassVar[dict[str, Any] | None] = None

    def __init__(self, layout: ParallelLayout, seed: int) -> None:
        if dist.get_world_size() != layout.world_size:
            raise ValueError(f"layout {layout} needs {layout.world_size} ranks, the world has {dist.get_world_size()}")
        if RoleGroups._in_force is not None:
            raise RuntimeError("role groups are created while others are active")
        if RoleGroups._pristine is None:
            RoleGroups._pristine = _globals()
        self.layout = layout
        self.rank = dist.get_rank()
        self.coordinates = layout.coordinates(self.rank)
        vars(mpu).update(RoleGroups._pristine)
        mpu.initialize_model_parallel(
            **only_known(
                mpu.initialize_model_parallel,
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
                context_parallel_size=layout.cp,
                expert_model_parallel_size=layout.ep,
                create_gloo_process_groups=True,
            )
        )
        mrandom.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        self._globals = _globals()
        self._rng_states = mrandom.get_cuda_rng_tracker().get_states()
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.pp_group = mpu.get_pipeline_model_parallel_group()
        self.dp_group = mpu.get_data_parallel_group(with_context_parallel=True)
        vars(mpu).update(RoleGroups._pristine)

    @property
    def is_last_stage(self) -> bool:
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def is_active(self) -> bool:
        return RoleGroups._in_force is self

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Put these groups and RNG states in force. May be nested for the same groups, never for others."""
        if RoleGroups._in_force is self:
            yield
            return
        if RoleGroups._in_force is not None:
            raise RuntimeError(
                f"groups of layout {RoleGroups._in_force.layout} are active; {self.layout} cannot be entered inside"
            )
        RoleGroups._in_force = self
        vars(mpu).update(self._globals)
        mrandom.get_cuda_rng_tracker().set_states(self._rng_states)
        try:
            yield
        finally:
            self._rng_states = mrandom.get_cuda_rng_tracker().get_states()
            self._globals = _globals()
            vars(mpu).update(RoleGroups._pristine or {})
            RoleGroups._in_force = None


def create_role_groups(layouts: Mapping[str, ParallelLayout], seed: int) -> dict[str, RoleGroups]:
    """Groups of each role; roles whose layouts have equal degrees share one. Every rank must call it with the same layouts."""
    made: dict[tuple[int, ...], RoleGroups] = {}
    roles = {}
    for role in sorted(layouts):
        layout = layouts[role]
        if layout.degrees not in made:
            made[layout.degrees] = RoleGroups(layout, seed)
        roles[role] = made[layout.degrees]
    return roles
