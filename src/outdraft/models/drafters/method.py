"""Which method a drafter's checkpoint is for, where it is no language model of its own."""

from pathlib import Path

from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.decoder.config import read_json
from outdraft.models.decoder.loader import tensor_places, weight_files
from outdraft.models.drafters.config import SPECULATORS_KIND

# Parts of names that config.json gives, and the methods they are for; the first one counts.
_METHODS = {
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    "mlpspeculator": "mlp_speculator",
    "dspark": "dspark",
    "dflash": "dflash",
    "eagle3": "eagle3",
    "peagle": "eagle3",
    "eagle": "eagle",
}


def drafter_method(path: Path) -> str | None:
    """The method whose drafter a checkpoint holds; None: as far as can be seen it is a model.

    Raises:
        ConfigError: there is no readable config.json, or there are no readable weights.
    """
    if is_gguf(path):
        return None
    raw = read_json(path / "config.json")
    kinds = raw.get(SPECULATORS_KIND), raw.get("model_type"), raw.get("architectures")
    names = str(kinds).lower()
    for part, method in _METHODS.items():
        if part in names:
            return method
    if "medusa_num_heads" in raw:
        return "medusa"
    # EAGLE's authors call theirs a Llama.
    if raw.get("draft_vocab_size") is not None:
        return "eagle3"
    places = tensor_places(weight_files(path), lambda name: name.removeprefix("model."))
    return "eagle" if "fc.weight" in places else None
