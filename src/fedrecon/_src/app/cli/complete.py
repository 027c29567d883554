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
    from fedrecon._src.recommend.personal_words import Suggestion

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
    from fedrecon._src.recommend.serving import load_completer, read_prompt
    from fedrecon._src.recommend.tasks.text import read_text

    completer = load_completer(args.run)
    text, max_words = read_text(args.text), completer.saved.config.model.max_words
    if not split_text(text):
        raise DataError(f"{args.text} contains no words")
    prompts = [read_prompt(prompt, max_words) for prompt in args.prompt]  # all of them before anything is printed
    anybody, person = completer.person(), completer.person(text)
    answers: list[dict[str, Any]] = []
    for prompt, words in zip(args.prompt, prompts, strict=True):
        initial, reconstructed = anybody.suggest(words, args.top), person.suggest(words, args.top)
        if args.json:
            suggestions = {"without": _as_json(initial), "with": _as_json(reconstructed)}
            answers.append({"prompt": prompt, "words": words, **suggestions})
            continue
        if len(words) < len(split_text(prompt)[-1]):
            show.remark(f"only the last {len(words)} words of the prompt {prompt!r} are used")
        rows = [(*_cells(own), *_cells(usual)) for own, usual in itertools.zip_longest(reconstructed, initial)]
        show.table(f"after: {' '.join(words)}", ("with their text", "", "without", ""), rows, texts=(0, 2))
    own_words = len(person.words.own)
    if args.json:
        print(json.dumps({"sentences": person.sentences, "own_words": own_words, "prompts": answers}))
        return 0
    legend = f"{OWN} marks the person's own words, outside the vocabulary ({own_words} in the text)"
    print(f"learned from {person.sentences} sentences; {legend}")
    return 0


def _as_json(suggestions: Sequence[Suggestion]) -> list[dict[str, Any]]:
    return [{**suggestion._asdict(), "probability": round(suggestion.probability, 6)} for suggestion in suggestions]


def _cells(suggestion: Suggestion | None) -> tuple[str, str]:
    if suggestion is None:
        return "", ""
    word = f"{suggestion.word} {OWN}" if suggestion.personal else suggestion.word
    return word, f"{100 * suggestion.probability:.1f} %"
