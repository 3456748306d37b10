"""A slow, literal reading of the paper in exact rational arithmetic, to compare the product with."""

from fractions import Fraction

Rows = list[list[Fraction]]


def gaps(primary: list[Fraction]) -> list[Fraction]:
    return [max(primary) - score for score in primary]


def in_sight(primary: list[Fraction], relaxation: Fraction, guardian_sees: str) -> list[int]:
    kept = [a for a, gap in enumerate(gaps(primary)) if gap <= relaxation]
    return list(range(len(primary))) if guardian_sees == "all" and len(kept) > 1 else kept


def regret(guardian: list[Fraction], sight: list[int]) -> Fraction:
    return max(guardian) - max(guardian[a] for a in sight)


def total(primary: Rows, guardian: Rows, relaxation: Fraction, guardian_sees: str) -> Fraction:
    return sum(
        (regret(g, in_sight(p, relaxation, guardian_sees)) for p, g in zip(primary, guardian, strict=True)),
        Fraction(0),
    )


def relaxation(primary: Rows, guardian: Rows, alpha: Fraction, bound: Fraction, guardian_sees: str) -> Fraction | None:
    """inf { lambda >= 0 : n/(n+1) R(lambda) + B/(n+1) <= alpha }; only 0 and the gaps can be it."""
    for point in sorted({Fraction(0), *(gap for row in primary for gap in gaps(row))}):
        if total(primary, guardian, point, guardian_sees) + bound <= alpha * (len(primary) + 1):
            return point
    return None
