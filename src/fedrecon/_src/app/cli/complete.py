"""`fedrecon complete`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Ge

from fedrecon._src.app.cli import options, show
from fedrecon._src.recommend.config import Rule

if TYPE_CHECKING:
    from fedrecon._src.recommend.serving import Completion

OWN = "*"  # marks a person's own words


@dataclass(frozen=True, kw_only=True)
class Complete:
    """Suggest the next words of a sentence.

    Suggestions are shown with and without what the person's text says about them: which words they use, which follow
    which, and their own words outside the model's vocabulary, which are marked. Needs only a saved model.
    Example: fedrecon complete runs/words --text my-mail.txt --prompt "see you at" --prompt "i will ask"

    Attributes:
      run: the folder of a run with --task text, or of a saved model.
      text: a plain text file written by the person; sentences end at line breaks.
      prompt: the beginning of a sentence; may be given several times.
      top: how many words to suggest.
      json: print one JSON object.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    text: Path
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    top: Annotated[int, Ge(1), tyro.conf.arg(aliases=("-n",))] = 5
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def rules(self) -> Iterator[Rule]:
        """Yield the rule that there is something to complete."""
        yield Rule(not self.prompt, "prompt", 'must be given: the beginning of a sentence, such as "i will"')


parse = partial(options.parse, Complete, "complete")


def run(args: Complete) -> int:
    """Complete and print."""
    from fedrecon._src.data import DataError, split_text
    from fedrecon._src.recommend.serving import load_completer
    from fedrecon._src.recommend.tasks.text import read_text

    completer = load_completer(args.run)
    text = read_text(args.text)
    if not split_text(text):
        raise DataError(f"{args.text} contains no words")
    answer = completer.complete(text, args.prompt, args.top)
    if args.json:
        prompts = [_as_json(prompt) for prompt in answer.prompts]
        print(json.dumps({"sentences": answer.sentences, "own_words": answer.personal_words, "prompts": prompts}))
        return 0
    for completion in answer.prompts:
        if len(completion.words) < len(split_text(completion.prompt)[-1]):
            show.remark(f"only the last {len(completion.words)} words of the prompt {completion.prompt!r} are used")
        _show(completion)
    legend = f"{OWN} marks the person's own words, outside the vocabulary ({answer.personal_words} in the text)"
    print(f"learned from {answer.sentences} sentences; {legend}")
    return 0


def _as_json(completion: Completion) -> dict[str, Any]:
    def listed(suggestions: Sequence[Any]) -> list[dict[str, Any]]:
        return [{**suggestion._asdict(), "probability": round(suggestion.probability, 6)} for suggestion in suggestions]

    return {
        "prompt": completion.prompt,
        "words": completion.words,
        "without": listed(completion.initial),
        "with": listed(completion.reconstructed),
    }


def _show(completion: Completion) -> None:
    def cells(suggestion: Any) -> tuple[str, str]:
        if suggestion is None:
            return "", ""
        word = f"{suggestion.word} {OWN}" if suggestion.personal else suggestion.word
        return word, f"{100 * suggestion.probability:.1f} %"

    pairs = itertools.zip_longest(completion.reconstructed, completion.initial)
    rows = [(*cells(reconstructed), *cells(initial)) for reconstructed, initial in pairs]
    columns = ("with their text", "", "without", "")
    show.table(f"after: {' '.join(completion.words)}", columns, rows, texts=(0, 2))
