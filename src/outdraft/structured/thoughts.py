"""Grammars of outputs before which a model thinks.

The thoughts are a part of the grammar that takes any text and is over at the first end mark. So
masks of drafts that reach from the thoughts into the form are right without more ado.
"""

import json
from typing import Any

from outdraft.core.structured_outputs import Thoughts

_FORM = "form_behind_thoughts"


def behind_thoughts(source: str, thoughts: Thoughts) -> str:
    """The grammar of thoughts and what follows them; `source` is llguidance's, as JSON or Lark."""
    rest = f"rest[suffix={json.dumps(thoughts.end)}]: /(?s:.*)/"
    if thoughts.start is None:
        head = f"start: rest @{_FORM}\n{rest}"
    else:
        head = f"start: thoughts? @{_FORM}\nthoughts: {json.dumps(thoughts.start)} rest\n{rest}"
    first, *others = _grammars(source)
    grammars = [{"lark_grammar": head}, first | {"name": _FORM}, *others]
    return json.dumps({"grammars": grammars})


def _grammars(source: str) -> list[dict[str, Any]]:
    if not source.startswith("{"):
        return [{"lark_grammar": source}]
    return json.loads(source)["grammars"]
