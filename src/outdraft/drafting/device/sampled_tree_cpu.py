# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportCallIssue=false
# ruff: noqa: ANN001, ANN202
"""Drawn trees of a network with a compiled pass: all passes, and all draws, in one call.

The fast twin of the loop in `TreeProposer` with `TreeBuilder`. It needs a batch in which every
request draws. The results are the same, because it calls the same kernels level by level; the
difference is that Python is not asked between the levels.

Dimension key: B requests, L levels, K rows of a tree, N = 1 + K nodes (0: the root), E nodes of
the level above, F rows of a level, R = B * E or B * F, T = B * (rows of the widest level), P
blocks, C ranks of a node's children, D the network's state, V vocabulary.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.core.jit import njit
from outdraft.core.tree_shape import TreeShape
from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device.drawn_level import side_shares
from outdraft.drafting.device.drawn_level_cpu import draw_rows, ranks_of_level
from outdraft.drafting.device.level_batch import place_level
from outdraft.drafting.device.model_drafts import ModelDrafts
from outdraft.drafting.device.sampled_chain_cpu import can_draw_chain, parameters_of, process_states
from outdraft.models.compiled_forward import CompiledChain
from outdraft.models.forward_kernels import Rows, read_chosen
from outdraft.sampling.batch import SamplingBatch

_NUM_ROWS = Rows._fields.index("num_rows")


class Texts(NamedTuple):
    """The texts that the trees of a batch continue; all fields but the last are int64 [B].

    Attributes:
        num_tokens_B: committed tokens.
        context_lens_B: what the network has read of them.
        num_rows_B: rows that each request wants, and slots that it has behind the context.
        block_table_BP: int32.
    """

    num_tokens_B: np.ndarray
    context_lens_B: np.ndarray
    num_rows_B: np.ndarray
    block_table_BP: np.ndarray


class _Shape(NamedTuple):
    """The shape that all trees of a batch have.

    Attributes:
        levels_L: int64, how many rows each level has.
        template_2K: int64, origin and rank of each row; without a template there are no columns.
        side_shares_C: float32, as `drawn_level.side_shares` gives them.
    """

    levels_L: np.ndarray
    template_2K: np.ndarray
    side_shares_C: np.ndarray


class _Pass(NamedTuple):
    """The arrays of one attention batch that every level fills, as far as it needs them."""

    query_start_B1: np.ndarray
    context_lens_B: np.ndarray
    ancestors_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray


class _Trees(NamedTuple):
    """What is drawn. Nodes have the root before the rows; their ancestors are bits of rows."""

    token_ids_BK: np.ndarray
    parents_BK: np.ndarray
    is_drawn_BK: np.ndarray
    probs_BKV: np.ndarray
    weight_BN: np.ndarray
    ancestors_BN: np.ndarray


def can_draw_trees(sampling: SamplingBatch) -> bool:
    """Whether every request draws, and compiled code can do all that their logits need."""
    return can_draw_chain(sampling) and sampling.all_draw


def draw_trees_cpu(
    chain: CompiledChain,
    batch: AttentionMetadata,
    states_BD: Tensor,
    texts: Texts,
    tree: TreeShape | TreeTemplate,
    sampling: SamplingBatch,
) -> ModelDrafts:
    """As `TreeBuilder` with the logits behind the states, and then behind each level.

    Args:
        chain: one pass over `batch`.
        batch: on the CPU, with room for the rows of the widest level; it is overwritten.
        sampling: as `drafting_parameters` leaves it; see `can_draw_trees`.

    Raises:
        ValueError: the vocabulary cannot fill a level.
    """
    trees = _blank(len(states_BD), tree.num_rows, sampling.vocab_size)
    _draw_trees(
        chain.shape,
        chain.rows_KF[0].copy(),
        chain.layers_LF,
        chain.head,
        states_BD.contiguous().numpy(),
        _shape_of(tree, sampling.vocab_size),
        texts,
        np.ascontiguousarray(sampling.seeds_B.numpy()),
        parameters_of(sampling),
        _Pass(
            batch.query_start_B1.numpy(),
            batch.context_lens_B.numpy(),
            batch.ancestors_T.numpy(),
            batch.positions_T.numpy(),
            batch.slots_T.numpy(),
        ),
        trees,
    )
    return ModelDrafts(
        torch.from_numpy(trees.token_ids_BK),
        torch.from_numpy(trees.parents_BK),
        torch.from_numpy(trees.probs_BKV),
        torch.from_numpy(trees.is_drawn_BK),
        all_sampled=True,
    )


def _shape_of(tree: TreeShape | TreeTemplate, vocab_size: int) -> _Shape:
    levels = tree.levels
    most_ranks = max(
        ranks_of_level(num_nodes, num_rows, vocab_size)
        for num_nodes, num_rows in zip((1, *levels), levels, strict=False)
    )
    template = ((), ())
    if isinstance(tree, TreeTemplate):
        template = [[at for level in each for at in level] for each in (tree.origins, tree.ranks)]
    return _Shape(
        np.array(levels, dtype=np.int64),
        np.array(template, dtype=np.int64),
        np.array(side_shares(most_ranks), dtype=np.float32),
    )


def _blank(num_requests: int, num_rows: int, vocab_size: int) -> _Trees:
    shape_BK, shape_BN = (num_requests, num_rows), (num_requests, 1 + num_rows)
    return _Trees(
        token_ids_BK=np.zeros(shape_BK, dtype=np.int64),
        parents_BK=np.empty(shape_BK, dtype=np.int64),
        is_drawn_BK=np.zeros(shape_BK, dtype=np.bool_),
        probs_BKV=np.empty((*shape_BK, vocab_size), dtype=np.float32),
        weight_BN=np.zeros(shape_BN, dtype=np.float32),
        ancestors_BN=np.zeros(shape_BN, dtype=np.int64),
    )


@njit(cache=True, nogil=True)
def _draw_trees(
    shape,
    fields,
    layers_LF,
    head,
    states_RD,
    tree,
    texts,
    seeds_B,
    parameters,
    level_pass,
    trees,
) -> None:
    num_requests, vocab_size = len(seeds_B), trees.probs_BKV.shape[2]
    requests_B = np.arange(num_requests)
    trees.weight_BN[:, 0] = 1
    above, first = 0, 1  # nodes of the level above, then those of the next one
    for depth in range(len(tree.levels_L)):
        if depth > 0:
            fields[_NUM_ROWS] = num_requests * (first - above)
            _place(shape, depth, above, first, texts, trees.ancestors_BN, level_pass)
            ids_R = trees.token_ids_BK[:, above - 1 : first - 1].copy().reshape(-1)
            read_chosen(shape, fields, layers_LF, ids_R, states_RD)
        processed_RV = np.empty((len(states_RD), vocab_size), dtype=np.float32)
        request_R = np.repeat(requests_B, first - above)
        process_states(shape, head, states_RD, request_R, parameters, processed_RV)
        end = first + tree.levels_L[depth]
        _draw_level(processed_RV, depth, above, first, end, tree, texts, seeds_B, trees)
        states_RD = _states_of_parents(states_RD, above, first, end, trees.parents_BK)
        above, first = first, end
    for b in range(num_requests):
        trees.token_ids_BK[b, max(0, texts.num_rows_B[b]) :] = -1


@njit
def _place(shape, depth, above, first, texts, ancestors_BN, level_pass) -> None:
    """Fill the batch that reads the nodes from `above` to `first`."""
    num_rows = len(ancestors_BN) * (first - above)
    place_level(
        ancestors_BN[:, above:first],
        above - 1,
        depth,
        texts.context_lens_B,
        texts.num_rows_B,
        texts.block_table_BP,
        shape.block_size,
        level_pass.query_start_B1,
        level_pass.context_lens_B,
        level_pass.ancestors_T[:num_rows],
        level_pass.positions_T[:num_rows],
        level_pass.slots_T[:num_rows],
    )


@njit
def _draw_level(processed_RV, depth, above, first, end, tree, texts, seeds_B, trees) -> None:
    """Draw the nodes from `first` to `end`, children of those from `above` on."""
    num_nodes = first - above
    template_2F = np.ascontiguousarray(tree.template_2K[:, first - 1 : end - 1])
    for b in range(len(seeds_B)):
        parents_F = trees.parents_BK[b, first - 1 : end - 1]
        draw_rows(
            processed_RV[b * num_nodes : (b + 1) * num_nodes],
            trees.weight_BN[b, above:first],
            template_2F,
            texts.num_rows_B[b] - (first - 1),
            depth,
            above,
            texts.num_tokens_B[b],
            seeds_B[b],
            tree.side_shares_C,
            trees.token_ids_BK[b, first - 1 : end - 1],
            parents_F,
            trees.is_drawn_BK[b, first - 1 : end - 1],
            trees.probs_BKV[b, first - 1 : end - 1],
            trees.weight_BN[b, first:end],
        )
        parents_F += above  # they were counted from the first of the level
        for row in range(first - 1, end - 1):
            of_parent = trees.ancestors_BN[b, trees.parents_BK[b, row]]
            trees.ancestors_BN[b, row + 1] = of_parent | (1 << row)


@njit
def _states_of_parents(states_RD, above, first, end, parents_BK):
    """[B * F, D]: for the nodes from `first` to `end` the states behind those they continue."""
    num_nodes, num_rows = first - above, end - first
    gathered_RD = np.empty((len(parents_BK) * num_rows, states_RD.shape[1]), dtype=np.float32)
    for b in range(len(parents_BK)):
        for row in range(num_rows):
            node = parents_BK[b, first - 1 + row] - above
            gathered_RD[b * num_rows + row] = states_RD[b * num_nodes + node]
    return gathered_RD
