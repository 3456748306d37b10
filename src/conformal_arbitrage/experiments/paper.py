"""The paper's own figures as data, by the labels of its tables.

Source: W. Overman and M. Bayati, "Conformal Arbitrage: Risk-Controlled Balancing of Competing Objectives in Language
Models". Columns: policy, alpha, accuracy, cost per 1000 (or severity loss for pku), relaxation, delta, Guardian share;
means over its 30 trials.
"""

from typing import NamedTuple


class PaperRow(NamedTuple):
    """One line of a table of the paper; None stands for a dash."""

    policy: str
    alpha: float | None
    accuracy: float
    cost: float
    relaxation: float | None = None
    delta: float | None = None
    guardian_share: float = 0.0


def _table(
    primary: tuple[float, float], guardian: tuple[float, float], *rows: tuple[float, ...]
) -> tuple[PaperRow, ...]:
    conformal = (PaperRow("conformal", *row[:6]) for row in rows)
    return (PaperRow("primary", None, *primary), *conformal, PaperRow("guardian", None, *guardian, None, None, 1.0))


TABLES: dict[str, tuple[PaperRow, ...]] = {
    "tab:truqa_main": _table(
        (0.559, 0.032),
        (0.833, 0.620),
        (0.25, 0.621, 0.188, 0.277, -0.011, 0.277),
        (0.20, 0.672, 0.234, 0.403, +0.019, 0.343),
        (0.15, 0.714, 0.302, 0.529, +0.029, 0.449),
        (0.10, 0.766, 0.407, 0.706, +0.031, 0.621),
        (0.05, 0.806, 0.521, 0.867, +0.016, 0.789),
    ),
    "tab:truqa_appendix_300": _table(
        (0.557, 0.032),
        (0.833, 0.615),
        (0.25, 0.619, 0.184, 0.280, -0.008, 0.273),
        (0.20, 0.667, 0.236, 0.405, +0.016, 0.350),
        (0.15, 0.710, 0.304, 0.542, +0.027, 0.456),
        (0.10, 0.757, 0.394, 0.700, +0.028, 0.603),
        (0.05, 0.801, 0.513, 0.861, +0.018, 0.783),
    ),
    "tab:truqa_appendix_500": _table(
        (0.554, 0.032),
        (0.833, 0.615),
        (0.25, 0.625, 0.184, 0.301, -0.005, 0.273),
        (0.20, 0.672, 0.233, 0.414, +0.020, 0.346),
        (0.15, 0.715, 0.301, 0.563, +0.031, 0.451),
        (0.10, 0.765, 0.402, 0.712, +0.032, 0.620),
        (0.05, 0.806, 0.524, 0.881, +0.019, 0.801),
    ),
    "tab:truqa_guardian_scores": _table(
        (0.556, 0.032),
        (0.831, 0.615),
        (0.25, 0.598, 0.163, 0.203, -0.021, 0.240),
        (0.20, 0.661, 0.222, 0.394, +0.014, 0.328),
        (0.15, 0.714, 0.304, 0.558, +0.029, 0.456),
        (0.10, 0.771, 0.414, 0.741, +0.032, 0.631),
        (0.05, 0.813, 0.554, 0.917, +0.013, 0.848),
    ),
    "tab:truqa_appendix_d": _table(
        (0.559, 0.032),
        (0.833, 0.620),
        (0.25, 0.687, 0.206, 0.277, +0.046, 0.277),
        (0.20, 0.713, 0.247, 0.403, +0.052, 0.343),
        (0.15, 0.741, 0.313, 0.529, +0.050, 0.449),
        (0.10, 0.785, 0.421, 0.706, +0.043, 0.621),
        (0.05, 0.812, 0.525, 0.867, +0.020, 0.789),
    ),
    "tab:truqa_model_ablation": _table(
        (0.7738, 0.126),
        (0.8328, 0.615),
        (0.050, 0.8156, 0.265, 0.452, +0.021, 0.239),
        (0.025, 0.8345, 0.375, 0.669, +0.026, 0.412),
    ),
    "tab:mmlu_restricted": _table(
        (0.591, 0.035),
        (0.828, 0.676),
        (0.25, 0.618, 0.111, 0.126, -0.005, 0.130),
        (0.20, 0.663, 0.194, 0.423, +0.011, 0.245),
        (0.15, 0.706, 0.317, 0.651, +0.008, 0.429),
        (0.10, 0.753, 0.416, 0.771, +0.018, 0.558),
        (0.05, 0.802, 0.624, 0.924, -0.005, 0.869),
    ),
    "tab:pku_main": _table(
        (0.519, 0.676),
        (0.156, 0.000),
        (0.60, 0.475, 0.571, 0.206, +0.012, 0.190),
        (0.50, 0.443, 0.482, 0.354, +0.028, 0.356),
        (0.40, 0.393, 0.379, 0.495, +0.033, 0.518),
        (0.30, 0.325, 0.245, 0.619, +0.037, 0.717),
        (0.20, 0.270, 0.161, 0.681, +0.028, 0.822),
        (0.10, 0.214, 0.080, 0.777, +0.015, 0.918),
    ),
}

SET_SIZES = {0.25: 1.457, 0.20: 1.801, 0.15: 2.105, 0.10: 2.587, 0.05: 3.253}
"""tab:truqa_unrestricted_cal: mean number of candidates by alpha."""


def row_at(label: str, alpha: float) -> PaperRow:
    """Return the line of a table at one alpha."""
    return next(row for row in TABLES[label] if row.alpha == alpha)
