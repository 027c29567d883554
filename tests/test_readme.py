import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_example_of_the_readme_runs_and_recommends(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert "rounds=500" in code
    names = {}
    exec(code.replace("rounds=500", "rounds=3"), names)
    metrics, items = capsys.readouterr().out.strip().split("\n", 1)
    assert "'rmse'" in metrics
    recommended = [int(word) for word in re.findall(r"\d+", items)]
    assert len(recommended) == 10
    assert not set(recommended) & set(names["test"][0]["item"].tolist())


def test_every_page_the_readme_points_to_is_there():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
