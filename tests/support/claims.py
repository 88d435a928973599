"""Findings of softmax and linear attention in copy, for tests of claims."""

from typing import Any

from attnbench.settings.check import read
from attnbench.settings.combinations import check_plan
from attnbench.settings.schema import PlanSettings


def contrast(kind: str = "existence", *variants: str, **changed: Any) -> dict[str, Any]:
    needs_threshold = kind in ("existence", "difference", "best_of")
    values = {"kind": kind, "variants": list(variants) or ["softmax"], "metric": "symbol_accuracy"}
    return {**values, "threshold": 0.9 if needs_threshold else None, "settings": {"length": 50}, **changed}


def finding(*contrasts: dict[str, Any], plan: dict[str, Any] | None = None, **claim: Any) -> PlanSettings:
    """Return a plan whose claim has these contrasts."""
    values = {
        "statement": "Softmax copies",
        "source": "nobody",
        "tier": "exact",
        "published": "1.0",
        "contrasts": list(contrasts) or [contrast()],
        "minutes": {"cpu": 1.5},
    }
    variants = {"softmax": ["attn=softmax"], "linear": ["attn=linear"], "lstm": ["attn=lstm"]}
    seeds = [*range(10)]
    given = {"name": "little", "overrides": [], "variants": variants, "evaluations": ["copy"], "seeds": seeds}
    given |= {"probe_seeds": seeds, "learning_rates": None, "rank": [], "claim": {**values, **claim}, **(plan or {})}
    settings = read(PlanSettings, given, "plan")
    check_plan(settings)
    return settings
