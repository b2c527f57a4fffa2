"""How long the rest of an audit takes: what every kind of test took when it was measured, and how fast this run is.

    pace = Pace(session.items, tokens=250, steps=130, layers=8); pace.took(nodeid, seconds); pace.left()

Most of the time goes into a few tests: those that run the models, and those of whole models. A mean over what came so far says
nothing about them, so each has its share here; a run's own speed, and its own times of the same test, take over as they are
measured. A test without a line takes OTHER.
Tests: parity/unit/test_pace.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Seconds of one core that does nothing else: 4 layers, 250 tokens and 24 steps on the CPU device, nothing from the cache.
LAYERS, TOKENS, STEPS = 4, 250, 24
PASSES = {"prefill": 10.6, "decode": 13.4}  # in the first test of a phase: production, reference, layers alone, twins
OTHER = 0.006
PER_LAYER = ("test_graph.py", "test_memory.py", "test_logits.py", "test_self.py", "test_recall.py")  # what whole models take grows with their layers
SECONDS = {
    "test_graph.py::test_replayed_steps_allocate_nothing": 2.8,
    "test_graph.py::test_replayed_steps_are_the_launched_ones": 2,
    "test_layers.py::test_point": 0.0023,
    "test_load.py::test_an_awkward_checkpoint_is_held_bit_for_bit": 1.4,
    "test_logits.py::test_greedy_text": 2,
    "test_memory.py::test_a_full_state_refuses_one_token_more_and_keeps_the_rest": 0.49,
    "test_memory.py::test_buffers_are_as_wide_as_what_is_stored": 0.19,
    "test_memory.py::test_calls_allocate_nothing_that_stays": 1.7,
    "test_mixing.py::test_sinkhorn_runs_as_many_iterations_as_configured": 0.023,
    "test_mixing.py::test_streams_are_the_sum_of_their_parts": 0.028,
    "test_mixing.py::test_weights_follow_from_their_own_streams": 0.021,
    "test_operations_at_once.py::test_project_hidden_is_its_products": 0.011,
    "test_operations_attention.py::test_compressor_pools_gates_that_overflow_an_exponential": 0.067,
    "test_operations_attention.py::test_compressor_step_goes_on_from_any_prefill": 0.069,
    "test_operations_attention.py::test_hc_gives_the_same_bits_in_a_large_call": 0.45,
    "test_operations_attention.py::test_hc_pre_at_once_gives_a_token_the_same_bits_however_it_is_run": 0.66,
    "test_operations_attention.py::test_hc_pre_at_once_of_streams_as_they_are": 0.042,
    "test_operations_attention.py::test_hc_pre_at_once_puts_a_half_back_mixes_and_norms": 0.033,
    "test_operations_attention.py::test_hc_pre_normalises_columns_last": 0.01,
    "test_operations_attention.py::test_indexer_score_looks_at_complete_entries_only": 0.032,
    "test_operations_attention.py::test_sparse_attn_at_the_edges": 0.034,
    "test_operations_attention.py::test_sparse_attn_flash_counts_the_sink_once": 0.014,
    "test_operations_attention.py::test_sparse_attn_flash_does_not_depend_on_who_shares_a_block": 0.49,
    "test_operations_attention.py::test_sparse_attn_of_a_split_that_towers_over_the_others": 0.014,
    "test_operations_attention.py::test_topk_of_a_million_tokens": 0.071,
    "test_operations_attention.py::test_topk_of_rows_in_parts": 0.078,
    "test_operations_blocks.py::test_moe_routes_and_clamps": 0.043,
    "test_operations_dense.py::test_experts_down": 0.018,
    "test_operations_dense.py::test_experts_stream_has_the_same_bits_for_any_alignment_and_rows_of_a_warp": 0.17,
    "test_operations_dense.py::test_experts_tiles": 0.46,
    "test_operations_dense.py::test_experts_tiles_give_a_token_the_same_bits_in_any_company_and_tile": 0.13,
    "test_operations_dense.py::test_experts_up": 0.028,
    "test_operations_dense.py::test_experts_weights_are_exact_at_any_scale": 0.01,
    "test_operations_dense.py::test_linear_bf16": 0.0062,
    "test_operations_dense.py::test_linear_bf16_tiles": 0.098,
    "test_operations_dense.py::test_linear_fp8": 0.01,
    "test_operations_dense.py::test_linear_fp8_tiles": 0.042,
    "test_operations_dense.py::test_linear_fp8_tiles_are_exact_at_any_scale": 0.0078,
    "test_operations_dense.py::test_linear_tiles_give_a_token_the_same_bits_in_any_company_and_tile": 0.076,
    "test_operations_dense.py::test_rms_norm": 0.0061,
    "test_operations_indexer.py::test_long_rows_and_chunks_wrap": 0.66,
    "test_operations_indexer.py::test_scores_do_not_depend_on_the_kernel_or_on_the_other_tokens": 0.33,
    "test_operations_indexer.py::test_scores_of_262144_entries_at_the_last_position": 3,
    "test_operations_long_context.py::test_indexer_score_sees_262144_entries_at_the_last_position": 0.21,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_at_the_edges": 0.47,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_at_the_end_of_the_longest_context": 0.089,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_counts_the_sink_once": 0.15,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_does_not_depend_on_how_many_splits_are_empty": 0.26,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_follows_a_maximum_that_moves": 0.24,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_of_a_split_that_towers_over_the_others": 0.28,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_of_a_token_does_not_depend_on_the_others": 1.4,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_of_any_number_of_tiles": 0.17,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_skips_holes_in_the_list": 0.31,
    "test_operations_wgmma.py::test_sparse_attn_wgmma_takes_queries_and_outputs_at_any_address": 0.16,
    "test_operations_whole.py::test_a_cache_holds_what_its_formats_need": 0.083,
    "test_operations_whole.py::test_a_call_that_breaks_half_way_leaves_the_state_as_it_was": 0.12,
    "test_operations_whole.py::test_a_decode_step_allocates_nothing": 0.9,
    "test_operations_whole.py::test_a_row_alone_is_the_row_in_an_uneven_batch": 0.64,
    "test_operations_whole.py::test_a_row_takes_max_context_tokens": 0.44,
    "test_operations_whole.py::test_a_state_comes_back_as_it_was": 0.24,
    "test_operations_whole.py::test_chunked_prefill_is_one_shot_prefill": 0.38,
    "test_operations_whole.py::test_every_parameter_is_the_checkpoints": 0.43,
    "test_operations_whole.py::test_no_kernel_leaves_its_memory": 0.52,
    "test_operations_whole.py::test_what_is_stored_stays": 0.38,
    "test_recall.py::test_recall_at_the_published_head_count": 0.085,
    "test_recall.py::test_recall_on_keys_made_to_hurt": 0.086,
    "test_recall.py::test_recall_on_real_keys_resampled": 0.28,
    "test_recall.py::test_recall_over_the_run": 0.2,
    "test_self.py::test_way": 0.22,
    "test_visible.py::test_raw_and_pooled_copies_weigh_the_same": 0.027,
}
PRIOR_SECONDS, PRIOR_TESTS = 2.0, 3  # what is measured counts against this much of the table
RECENT_SECONDS = 6.0  # of the table, until a test's speed counts half: what else a machine does comes and goes


@dataclass
class Kind:
    """Tests of one function: `expected` seconds of one, how many are to come, how many came and what they took."""

    expected: float
    ahead: int = 0
    came: int = 0
    seconds: float = 0.0

    def each(self, speed: float) -> float:
        """What one of them takes, by the table and by those that came."""
        return (PRIOR_TESTS * speed * self.expected + self.seconds) / (PRIOR_TESTS + self.came)


class Pace:
    """The tests of a session, and what they took."""

    def __init__(self, items: Sequence[Any], tokens: int, steps: int, layers: int) -> None:
        self.kinds: dict[str, Kind] = {}
        self.passes: dict[str, float] = {}  # first test of a phase: what the models' passes take
        self.took_passes = self.expected_passes = self.took_tests = self.expected_tests = 0.0
        self.ahead: set[str] = set()
        size = {"prefill": tokens / TOKENS, "decode": steps / STEPS}
        begun: set[str] = set()
        for item in items:
            kind = _kind(item.nodeid)
            per_layer = kind.startswith(PER_LAYER)
            self.kinds.setdefault(kind, Kind(SECONDS.get(kind, OTHER) * (layers / LAYERS if per_layer else 1.0))).ahead += 1
            self.ahead.add(item.nodeid)
            phase = _phase(item)
            due = [p for p in (("prefill", "decode") if phase == "decode" else (phase,)) if p in PASSES and p not in begun]
            begun.update(due)
            if due:
                self.passes[item.nodeid] = sum(PASSES[p] * size[p] * layers / LAYERS for p in due)

    def took(self, nodeid: str, seconds: float) -> None:
        """A test is over."""
        if nodeid not in self.ahead:
            return
        self.ahead.discard(nodeid)
        kind = self.kinds[_kind(nodeid)]
        kind.ahead -= 1
        if nodeid in self.passes:
            self.took_passes += seconds
            self.expected_passes += self.passes.pop(nodeid)
            return
        kind.came += 1
        kind.seconds += seconds
        before = 0.5 ** (kind.expected / RECENT_SECONDS)
        self.took_tests = before * self.took_tests + seconds
        self.expected_tests = before * self.expected_tests + kind.expected

    def left(self) -> float:
        """Seconds that are still to come."""
        passes = (PRIOR_SECONDS + self.took_passes + self.took_tests) / (PRIOR_SECONDS + self.expected_passes + self.expected_tests)
        # What came may be faster than the rest for the cache's sake: a machine that is twice as fast is believed when tests show it.
        tests = (PRIOR_SECONDS * max(passes, 1.0) + self.took_tests) / (PRIOR_SECONDS + self.expected_tests)
        return sum(kind.ahead * kind.each(tests) for kind in self.kinds.values()) + passes * sum(self.passes.values())


def _kind(nodeid: str) -> str:
    """test_layers.py::test_point of parity/test_layers.py::test_point[decode-...]."""
    return nodeid.partition("[")[0].rpartition("/")[2]


def _phase(item: Any) -> str:
    asked = item.callspec.params if hasattr(item, "callspec") else {}
    return next((phase for phase in (value if name == "phase" else getattr(value, "phase", None) for name, value in asked.items()) if isinstance(phase, str)), "")
