"""Cascade logs for tests: a world with known models, and the shared log of nine models."""

import numpy as np

from conformal_arbitrage.scorelog.cascade import CascadeLog, ModelColumns

KEY = b"a key for the draws of tests"
SKILLS = {"small": 0.6, "middle": 0.8, "large": 0.9}
COSTS = {"small": 0.02, "middle": 0.15, "large": 0.4}


def world(rng, n, *, skills=SKILLS, guardian=0.95, graded=False, prefix="q"):
    """Draw questions of different difficulty: models are right more often, and more confident, on easy ones."""
    easy = rng.random(n)
    models = {}
    for name, skill in skills.items():
        right = rng.random(n) < np.clip(skill + 0.6 * (easy - 0.5), 0.02, 0.99)
        confidence = np.clip(0.5 * easy + 0.3 * right + 0.2 * rng.random(n), 0, 1)
        grade = right * rng.choice([0.5, 1.0], n) if graded else right.astype(float)
        answer = np.where(right, "yes", rng.choice(["no", "maybe"], n))
        models[name] = ModelColumns(
            confidence=np.round(confidence, 2),
            grade=grade,
            cost=np.full(n, COSTS.get(name, 0.1)) * (0.9 + 0.2 * rng.random(n)),
            answer=answer.tolist(),
        )
    return CascadeLog.from_columns(
        id=[f"{prefix}{k}" for k in range(n)],
        models=models,
        guardian_grade=(rng.random(n) < guardian).astype(float),
        guardian_cost=np.ones(n),
    )


def nine_models(shared, dataset, guardian, models=None):
    """Read one dataset of the shared log of nine models."""
    import duckdb

    rows = duckdb.sql(
        "select split || '-' || qidx, model, answer, correct, least(exp(raw_confidence), 1), cost_usd "
        f"from '{shared / 'cascade-outcomes-9models.parquet'}' where dataset = '{dataset}' order by split, qidx, model"
    ).fetchall()
    ids = list(dict.fromkeys(row[0] for row in rows))
    by_model = {}
    for id, model, *rest in rows:
        by_model.setdefault(model, {})[id] = rest
    columns = {model: list(zip(*(found[id] for id in ids), strict=True)) for model, found in by_model.items()}
    answer, grade, confidence, cost = range(4)
    best = columns.pop(guardian)
    return CascadeLog.from_columns(
        id=ids,
        models={
            name: ModelColumns(confidence=each[confidence], grade=each[grade], cost=each[cost], answer=each[answer])
            for name, each in columns.items()
            if models is None or name in models
        },
        guardian_grade=best[grade],
        guardian_cost=best[cost],
        guardian=guardian,
        source=dataset,
    )
