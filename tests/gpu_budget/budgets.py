"""Most kernels that a step may launch on a GPU: the tables of test_launches.py.

The numbers are those of models with 3 layers, launch by launch unless a table says otherwise. A
test fails above them. Lower them after a change that launches less.
"""

from typing import NamedTuple

from tests.gpu_budget.steps import Case
from tests.oracle.engines import LIBRARY

Budget = tuple[int, int, int, int]  # of drafting, of the target's pass, of choosing, of the rest

# Operations that wait for the device, or launch far too much.
PHI_MOE = "transformers, PhimoeTopKRouter: a number of the host is copied to the device"
MASSES = "drafting/device/self_drafter.py:141, AttendedBlocks.narrowed: .cpu() of blocks' masses"
EAGER_NOISE = "verification/verifier.py:132, VerificationStep without `source`: torch/noise.py"

# The target's pass, by family.
PASSES = {
    "llama": 33,
    "llama-one-head-each": 33,
    "llama-biases": 33,
    "llama-tied": 33,
    "llama-wide-heads": 33,
    "llama-linear-rope": 33,
    "llama-llama3-rope": 33,
    "llama-yarn-rope": 33,
    "mistral-window": 33,
    "mistral-no-window": 33,
    "qwen2": 33,
    "qwen2-window": 33,
    "qwen3": 33,
    "qwen3-window": 33,
    "mimo": 33,
    f"{LIBRARY}apertus": 248,
    f"{LIBRARY}cohere": 140,
    f"{LIBRARY}deepseek-v2": 250,
    f"{LIBRARY}deepseek-v3": 306,
    f"{LIBRARY}ernie-4.5": 165,
    f"{LIBRARY}exaone-4": 262,
    f"{LIBRARY}falcon": 90,
    f"{LIBRARY}falcon-40b": 102,
    f"{LIBRARY}gemma": 144,
    f"{LIBRARY}gemma-2": 198,
    f"{LIBRARY}gemma-3": 264,
    f"{LIBRARY}gemma-4": 370,
    f"{LIBRARY}glm-4": 215,
    f"{LIBRARY}glm-4-moe": 283,
    f"{LIBRARY}glm-4-moe-lite": 304,
    f"{LIBRARY}gpt-2": 69,
    f"{LIBRARY}gpt-neox": 100,
    f"{LIBRARY}gpt-oss": 241,
    f"{LIBRARY}granite": 150,
    f"{LIBRARY}hunyuan-moe": 281,
    f"{LIBRARY}llama": 143,
    f"{LIBRARY}llama-4": 289,
    f"{LIBRARY}mellum": 269,
    f"{LIBRARY}minicpm-3": 226,
    f"{LIBRARY}mistral": 143,
    f"{LIBRARY}mixtral": 200,
    f"{LIBRARY}nemotron": 106,
    f"{LIBRARY}olmo-2": 201,
    f"{LIBRARY}olmoe": 254,
    f"{LIBRARY}opt": 58,
    f"{LIBRARY}phi-3": 155,
    f"{LIBRARY}qwen-2": 143,
    f"{LIBRARY}qwen-2-moe": 224,
    f"{LIBRARY}qwen-3": 197,
    f"{LIBRARY}qwen-3-moe": 254,
    f"{LIBRARY}seed-oss": 146,
    f"{LIBRARY}smollm-3": 174,
    f"{LIBRARY}stablelm": 102,
    f"{LIBRARY}starcoder-2": 91,
}
# Families whose pass waits, and for what. Their passes have no budget yet.
WAITING_PASSES = {f"{LIBRARY}phi-moe": PHI_MOE}
TAPPED = 4  # more launches of a pass whose residual streams a drafter reads


class MethodBudget(NamedTuple):
    """Launches of a method's phases beside the target's pass and the choice.

    Attributes:
        greedy, drawn, cut: of drafting: the likeliest tokens, drawn ones, and those of requests
            with parameters that change logits or share noise.
        rest: of what else a step does.
    """

    greedy: int
    drawn: int
    cut: int
    rest: int


METHODS = {
    "plain": MethodBudget(0, 0, 0, rest=12),
    "ngram": MethodBudget(0, 0, 0, rest=17),
    "ngram-tree": MethodBudget(0, 0, 0, rest=90),
    "draft_model": MethodBudget(74, 108, 219, rest=17),
    "draft_model-tree": MethodBudget(115, 292, 403, rest=90),
    "perfect": MethodBudget(134, 168, 279, rest=17),
    "perfect-tree": MethodBudget(175, 352, 463, rest=90),
    "pard": MethodBudget(40, 74, 185, rest=17),
    "eagle": MethodBudget(79, 113, 224, rest=61),
    "eagle-tree": MethodBudget(120, 297, 408, rest=134),
    "eagle3": MethodBudget(95, 129, 240, rest=61),
    "eagle3-tree": MethodBudget(136, 313, 424, rest=134),
    "p-eagle": MethodBudget(51, 85, 196, rest=61),
    "medusa": MethodBudget(39, 73, 184, rest=61),
    "medusa-tree": MethodBudget(78, 257, 368, rest=134),
    "mlp_speculator": MethodBudget(82, 116, 227, rest=61),
    "mlp_speculator-tree": MethodBudget(121, 298, 409, rest=134),
    "dflash": MethodBudget(86, 120, 231, rest=61),
    "dflash-tree": MethodBudget(125, 304, 415, rest=134),
    "dspark": MethodBudget(103, 137, 248, rest=61),
    "dspark-tree": MethodBudget(142, 319, 430, rest=134),
    "self": MethodBudget(133, 167, 278, rest=17),
    "self-tree": MethodBudget(174, 351, 462, rest=90),
    "mtp": MethodBudget(94, 128, 239, rest=61),
    "mtp-tree": MethodBudget(135, 312, 423, rest=134),
}
REPORTED = 4  # more launches of the rest where log-probabilities or drafts go to the host


class ChoiceBudget(NamedTuple):
    """Launches of a choice: without drafts, with the host's, and with a network's."""

    plain: int
    host_chain: int
    host_tree: int
    chain: int
    tree: int


CHOICES = {
    "greedy": ChoiceBudget(37, 68, 77, 68, 80),
    "drawn": ChoiceBudget(68, 99, 126, 28, 411),
    "top-k": ChoiceBudget(77, 108, 135, 37, 420),
    "cut": ChoiceBudget(105, 136, 163, 65, 448),
    "seeded": ChoiceBudget(68, 99, 126, 99, 132),
    "penalties": ChoiceBudget(105, 157, 211, 86, 502),
    "limits": ChoiceBudget(75, 123, 159, 123, 168),
    "bad words": ChoiceBudget(104, 159, 213, 88, 504),
    "grammar": ChoiceBudget(71, 101, 128, 30, 413),
    "logprobs": ChoiceBudget(86, 123, 132, 123, 135),
}


def _verified(method: str, rule: str) -> Case:
    return Case("qwen2", method, "drawn", options=(("rejection_sample_method", rule),))


STEPS: dict[Case, Budget] = {
    Case("qwen2", "plain", "drawn", kind="chunk"): (0, 36, 68, 12),
    Case("qwen2", "plain", "prompt logprobs", kind="chunk"): (0, 35, 37, 53),
    Case("qwen2", "draft_model", "drawn", kind="chunk"): (108, 36, 28, 16),
    Case("qwen2", "eagle3", "drawn", kind="chunk"): (148, 40, 28, 62),
    Case("qwen2", "eagle3-tree", "drawn", kind="chunk"): (332, 40, 411, 136),
    Case("qwen2", "dflash", "drawn", kind="chunk"): (148, 39, 28, 62),
    Case("qwen2", "medusa", "drawn", kind="chunk"): (73, 36, 28, 62),
    Case("qwen2", "draft_model", "drawn", kind="live"): (204, 33, 28, 17),
    Case("qwen2", "eagle3", "drawn", kind="live"): (225, 37, 28, 61),
    Case("qwen2", "dspark", "drawn", kind="live"): (236, 36, 28, 61),
    Case("qwen2", "draft_model", "drawn", kind="idle"): (107, 33, 118, 24),
    Case("qwen2", "eagle3-tree", "drawn", kind="idle"): (312, 37, 534, 142),
    _verified("draft_model", "token"): (108, 33, 95, 16),
    _verified("eagle3-tree", "token"): (313, 37, 411, 134),
    _verified("draft_model", "drafter_invariant"): (113, 33, 99, 17),
    Case(f"{LIBRARY}falcon", "perfect", "drawn"): (339, 90, 28, 16),
    Case(f"{LIBRARY}falcon", "medusa", "drawn"): (73, 90, 28, 60),
    Case(f"{LIBRARY}gpt-2", "eagle3-tree", "drawn"): (313, 73, 411, 134),
    Case(f"{LIBRARY}phi-3", "self", "drawn"): (533, 155, 28, 16),
    Case(f"{LIBRARY}phi-3", "draft_model", "cut", 64): (219, 155, 65, 16),
    Case(f"{LIBRARY}gemma-2", "eagle3-tree", "drawn"): (313, 202, 410, 134),
    Case(f"{LIBRARY}gemma-3", "self", "greedy"): (826, 264, 64, 16),
    Case(f"{LIBRARY}gpt-oss", "draft_model", "drawn"): (108, 241, 24, 16),
    Case(f"{LIBRARY}deepseek-v3", "mtp", "drawn"): (515, 305, 24, 60),
    Case(f"{LIBRARY}glm-4-moe", "mtp-tree", "greedy"): (498, 282, 76, 134),
}
# Steps that launch far too much today, with the budget that they should keep to.
EXCESSIVE: dict[Case, tuple[Budget, str]] = {
    _verified("draft_model", "lossy_typical"): ((108, 33, 181, 16), EAGER_NOISE),
    _verified("eagle3-tree", "lossy_typical"): ((313, 37, 235, 134), EAGER_NOISE),
}
WAITING_STEPS: dict[Case, str] = {
    Case("qwen2", "self", "drawn", 1, kind="long", options=(("kv_budget", 16),)): MASSES,
    Case("qwen2", "self-tree", "drawn", 1, kind="long", options=(("kv_budget", 16),)): MASSES,
}

# Steps whose CUDA graphs are there. A graph is 1 launch.
GRAPHED: dict[Case, Budget] = {
    Case("qwen2", "plain", "greedy", has_graphs=True): (0, 8, 11, 12),
    Case("qwen2", "plain", "drawn", 64, has_graphs=True): (0, 8, 11, 12),
    Case("qwen2", "ngram", "greedy", has_graphs=True): (0, 8, 13, 17),
    Case("qwen2", "ngram-tree", "drawn", has_graphs=True): (0, 8, 13, 91),
    Case("qwen2", "draft_model", "greedy", has_graphs=True): (19, 8, 13, 17),
    Case("qwen2", "draft_model", "drawn", has_graphs=True): (19, 8, 13, 16),
    Case("qwen2", "draft_model", "cut", 64, has_graphs=True): (19, 8, 13, 16),
    Case("qwen2", "draft_model", "penalties", has_graphs=True): (19, 8, 84, 16),
    Case("qwen2", "draft_model", "logprobs", has_graphs=True): (19, 8, 123, 19),
    Case("qwen2", "draft_model", "grammar", has_graphs=True): (19, 8, 28, 20),
    Case("qwen2", "draft_model", "drawn", has_graphs=True, kind="chunk"): (19, 13, 13, 16),
    Case("qwen2", "draft_model", "drawn", has_graphs=True, kind="live"): (21, 8, 13, 17),
    Case("qwen2", "draft_model", "drawn", has_graphs=True, kind="idle"): (16, 12, 17, 24),
    Case("qwen2", "draft_model-tree", "drawn", has_graphs=True): (19, 12, 13, 90),
    Case("qwen2", "pard", "drawn", has_graphs=True): (70, 8, 13, 16),
    Case("qwen2", "eagle", "drawn", has_graphs=True): (22, 8, 13, 60),
    Case("qwen2", "eagle3", "greedy", has_graphs=True): (23, 9, 13, 61),
    Case("qwen2", "eagle3-tree", "greedy", has_graphs=True): (23, 13, 13, 135),
    Case("qwen2", "eagle3-tree", "drawn", has_graphs=True): (23, 13, 13, 134),
    Case("qwen2", "medusa", "drawn", has_graphs=True): (73, 8, 13, 60),
    Case("qwen2", "medusa-tree", "drawn", has_graphs=True): (257, 12, 13, 134),
    Case("qwen2", "mlp_speculator", "greedy", has_graphs=True): (82, 8, 13, 61),
    Case("qwen2", "dspark", "drawn", has_graphs=True): (123, 9, 13, 60),
    Case("qwen2", "self", "drawn", has_graphs=True): (18, 8, 13, 16),
    Case("mimo", "mtp", "drawn", has_graphs=True): (22, 8, 13, 60),
    Case(f"{LIBRARY}falcon", "eagle3-tree", "greedy", has_graphs=True): (23, 94, 13, 135),
    Case(f"{LIBRARY}falcon", "perfect", "drawn", has_graphs=True): (100, 90, 13, 16),
    Case(f"{LIBRARY}qwen-3", "perfect", "drawn", has_graphs=True): (19, 197, 13, 16),
}
