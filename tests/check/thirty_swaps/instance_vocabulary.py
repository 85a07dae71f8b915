"""Words of the titles, numbered before the network is built."""

from collections import Counter
from pathlib import Path

from pipeline import Context, stages
from pipeline.errors import DataError


class Instance(stages.Instance):
    def __init__(self, context: Context, titles: str, min_count: int = 1) -> None:
        super().__init__(context)
        self.titles = Path(titles)
        self.min_count = min_count

    def instance(self, context: Context) -> None:
        super().instance(context)
        if not self.titles.exists():
            raise DataError(f"{self.titles}: no such file; set instance_args.titles")
        counts = Counter(self.titles.read_text(encoding="utf-8").split())
        words = [word for word, count in counts.most_common() if count >= self.min_count]
        context["vocabulary"] = {word: number for number, word in enumerate(words)}
        (context["run_dir"] / "vocabulary.txt").write_text("\n".join(words), encoding="utf-8")
