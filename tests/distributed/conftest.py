"""Megatron is imported here in the way in which a run imports it, before the test files do."""

from megappo.parallel_state.device import import_megatron

import_megatron()
