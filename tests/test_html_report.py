"""The page of a report: whole, escaped, of its own, with links that lead somewhere."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import jax
import pytest
from deciding import measured, operands
from lower.kernels import PROGRAMS

import mirage_jax
from mirage_jax import UsageError, html_report
from mirage_jax.mugraph.parser import parse


class Balanced(HTMLParser):
    """Holds the tags that are open, and all attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids, self.links = set[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        found = dict(attrs)
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found["href"]] if "href" in found else []
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> mirage_jax.Report:
    def both(a, b, v):
        return jax.nn.softmax(a @ b) @ v, (a @ b) @ v

    f = mirage_jax.optimize(both, backend="jax", cache_dir=tmp_path_factory.mktemp("cache"))
    with measured(2.0):
        return f.explain(*operands(16))


def test_it_is_whole(report) -> None:
    text = html_report.page(report)
    page = Balanced(text)
    assert not page.open and page.links and all(link[1:] in page.ids for link in page.links)
    assert not re.search(r"<script|https?:|src=|@import|url\(", text)
    for part in (
        "Whole function: 2.00x",
        "Certificate",
        "Float gate",
        "Cache key",
        "optimized: 2.00x",
        "The program",
        "FLOP",
    ):
        assert part in text
    assert text.count("<svg") == 3 and text.count("Runs as") == 1  # one region stays
    assert "XLA: 2,000,000.0 us" in text and "ours: 1,000,000.0 us" in text and "limit: " in text


def test_text_is_escaped(report) -> None:
    evil = replace(report, name="<script>x</script>", notes=("a & b <i>",))
    page = html_report.page(evil)
    assert "<script" not in page and "a &amp; b &lt;i&gt;" in page and not Balanced(page).open


def test_variants_and_kernels_are_shown(report, tmp_path) -> None:
    (kernels := tmp_path / "kernels.py").write_text("def kernel(): return 1 < 2")
    optimized = report.optimized[0]
    decision = replace(optimized.decision, measured=((1e-6, 2e-6), (3e-6, 1e-6)), kernels=str(kernels))
    page = html_report.page(replace(report, regions=(replace(optimized, decision=decision),)))
    assert "2 variants: estimated (across) against measured (up), to 3.0 us" in page and page.count("<circle") == 2
    assert "return 1 &lt; 2" in page
    kernels.unlink()
    gone = html_report.page(replace(report, regions=(replace(optimized, decision=decision),)))
    assert "<summary>Kernels" not in gone


@pytest.mark.parametrize("name", list(PROGRAMS)[:4])
def test_a_drawing_has_every_node_and_edge(name) -> None:
    graph = PROGRAMS[name]("f16").graph
    svg = html_report.drawing(graph)
    assert not Balanced(svg).open
    assert svg.count("<rect") == len(graph.inputs) + len(graph.kernels)
    assert svg.count('class="edge"') == sum(len(kernel.loads) for kernel in graph.kernels)


def test_a_large_graph_is_not_drawn() -> None:
    steps = "\n".join(f"library t{n + 1}: f32[i] = exp t{n}[i]" for n in range(html_report.MAX_NODES))
    text = f"mugraph {{\nextents i=4\ninput t0: f32[i]\n{steps}\noutput t{html_report.MAX_NODES}\n}}"
    assert html_report.drawing(parse(text)) == ""


def test_save(report, tmp_path) -> None:
    assert report.save(tmp_path / "report.html").read_text() == html_report.page(report)
    assert json.loads(report.save(tmp_path / "report.json").read_text())["name"] == report.name
    assert report.save(str(tmp_path / "report.txt")).read_text() == str(report)
    with pytest.raises(UsageError, match=r"found 'report.pdf'; allowed are names that end in .html, .json, .txt"):
        report.save(tmp_path / "report.pdf")


def test_in_notebooks(report) -> None:
    assert repr(report).endswith("2 regions, 1 optimized>")
    assert report._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
