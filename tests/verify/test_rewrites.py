"""The verifier accepts what is right however it is written; what it misses has a stated reason, and is rare."""

import pytest
from mugraph.graphs import PROGRAMS

from mirage_jax import cli
from mirage_jax.audit.mutants import MutationSubject
from mirage_jax.audit.oracle import Oracle
from mirage_jax.audit.rewrites import REWRITES, Rewrite, RewriteReport, rewrite
from mirage_jax.audit.sources import Source, sources
from mirage_jax.errors import GraphError, VerificationError
from mirage_jax.mugraph.check import check_graph
from mirage_jax.mugraph.graph import KernelGraph
from mirage_jax.mugraph.parser import parse
from mirage_jax.verify.equivalence.certificate import certify

NAMES = ["rmsnorm_b1", "gated_mlp_b1", "gqa_b1", "causal", "window", "log_softmax", "relu_mlp", "exp_of_sum"]
COUNT = 250

# What the programs have no place for.
MORE = """mugraph {
  extents i=3 j=4 k=5
  input X: f32[i,j,k]
  kernel one grid() {
    %x = load X[i,j,k]
    %a[i,j,k] = affine{scale=2} %x
    %b[i] = sum{axes=(j,k)} %a
    %c[i] = max{axes=(j,k)} %a
    %d[i] = logistic %b
    %e[i] = le %b %c
    %f[i] = where %e %c %d
    %g[j,k] = sum{axes=(i)} %a
    %h[i,j,k] = mul %a %g
    %l[i,j,k] = add %a %h
    %m[i,j,k] = add %l %f
    %n[i,j,k] = exp{scale=1/64} %m
    %p[i,j,k] = mul %h %f
    %r[i,j] = sum{axes=(k)} %p
    %o[i,j,k] = exp{scale=-1/64} %n
    %s[i,j,k] = add %p %o
    %t[i,j] = dot{axes=(k)} %s %l
    %u[i,j] = div %t %r
    store v: f32[i,j] = %u
  }
  output v
}"""
SOURCES = [
    *(
        Source(p.name, p.graph(p.reference), p.graph(text))
        for p in PROGRAMS
        for text in (p.reference, *p.candidates.values())
    ),
    Source("more", parse(MORE), parse(MORE)),
]


@pytest.fixture(scope="module")
def campaign() -> RewriteReport:
    return rewrite(sources(2, NAMES, randoms=6, each=3), COUNT, seed=2)


def test_two_percent(campaign: RewriteReport) -> None:
    assert campaign.tried == COUNT >= 200
    assert not campaign.unexplained, "\n".join(campaign.unexplained)
    assert campaign.share <= 0.02, campaign.to_markdown()


def test_the_share_goes_by_places() -> None:
    seen, missed = "x y = y x", "where(c, x, y) = where(not c, y, x)"
    assert RewriteReport(0, 1, {seen: [90, 5, 0], missed: [10, 5, 5]}).share == 0.1
    assert (
        RewriteReport(0, 1, {seen: [90, 5, 0], missed: [10, 0, 0]}).share == 0.1
    )  # none drawn: as if all were refused
    assert RewriteReport(0, 1, {seen: [0, 0, 0]}).share == 0


def graphs(rule: Rewrite, source: Source) -> list[KernelGraph]:
    found = []
    for graph in rule.edits.mutants(source.candidate):
        try:
            check_graph(graph)
        except GraphError:
            continue
        found.append(graph)
    return found[:2]


@pytest.mark.parametrize("rule", REWRITES, ids=lambda r: r.name)
def test_rules(rule: Rewrite) -> None:
    """Each rule has a place, is true, and is seen or missed as it says."""
    seen = 0
    for source in SOURCES:
        made = graphs(rule, source)
        oracle = Oracle(source.reference, seed=0) if made else None
        for graph in made:
            if oracle is None or not oracle.same(graph):  # true, but not for floats: exp x exp -m overflows
                continue
            seen += 1
            if rule.sometimes:
                continue
            if rule.missed:
                with pytest.raises(VerificationError, match="differs"):
                    certify(source.reference, graph)
            else:
                certify(source.reference, graph)
    assert seen > 0


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setattr("mirage_jax.cli.audit.sources", lambda seed: SOURCES[:3])
    file = tmp_path / "r.json"
    assert cli.main(["rewrite", "--count", "20", "-q", "--json", str(file)]) == cli.OK
    assert "0 of 20 true rewrites refused" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(MutationSubject, "sound", property(lambda self: False))
    assert cli.main(["rewrite", "--count", "0"]) == cli.USAGE
