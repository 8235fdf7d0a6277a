"""Say what the calibration samples say of a port: the alpha they chose, the gain they promise, why it was held back.

Reads records; measures nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_bico.reports.record import LOSS, CurveRecord, MethodRecord, OutlookRecord, Record, SourceLeadRecord
from hf_bico.settings import LEARNABLE
from hf_bico.utils.text import count_text


def outlook_sentence(outlook: OutlookRecord, lead: SourceLeadRecord | None = None) -> str:
    """Say what the samples promise of the change; doubtful if a veto would drop it, or the source has no clear `lead`.

    >>> print(outlook_sentence(OutlookRecord(0.081, "accuracy", 0.02)))
    Outlook: about +8 points on data like the samples (± 2).
    >>> print(outlook_sentence(OutlookRecord(-0.004, "accuracy", 0.02)))
    Outlook: doubtful, about -0.4 points on data like the samples (± 2).
    """
    doubtful = "" if outlook.is_clear and (lead is None or lead.is_clear) else "doubtful, "
    if outlook.unit == LOSS:
        return f"Outlook: {doubtful}the loss {_moves(outlook.value)} on data like the samples{_plus_minus(outlook)}."
    points = _rounded_points(outlook.value)
    return f"Outlook: {doubtful}about {points} points on data like the samples{_plus_minus(outlook)}."


def _moves(fall: float) -> str:
    return f"falls by about {fall:.2g}" if fall > 0 else f"rises by about {-fall:.2g}"


def _plus_minus(outlook: OutlookRecord) -> str:
    if outlook.error is None:
        return ""
    error = outlook.error if outlook.unit == LOSS else 100 * outlook.error
    return f" (± {error:.2g})" if error < 10 else f" (± {error:.0f})"


def _rounded_points(difference: float) -> str:
    points = 100 * difference
    return f"{points:+.0f}" if abs(points) >= 1 else f"{points:+.1f}"


def alpha_sentence(method: MethodRecord) -> str | None:
    """Say which alpha the samples chose and why; None if they did not choose.

    >>> points = [CurveRecord(0.0, 2.0, 0.1), CurveRecord(0.5, 1.0, 0.0), CurveRecord(1.0, 1.5, 0.1)]
    >>> print(alpha_sentence(MethodRecord("bico", 0.5, [0], curve=points)))
    alpha 0.5: a larger alpha raises the samples' loss.
    """
    if not method.chosen_by_samples:
        return None
    if isinstance(method.alpha, float):
        return f"alpha {method.alpha:.2g}: {_reason(method.alpha, method.curve)}."
    alphas = ", ".join(f"{alpha:.2g}" for alpha in method.alpha)
    if not any(method.alpha):
        return f"alpha 0 in all {len(method.alpha)} steps: no step clearly lowers the samples' loss."
    return f"alpha {alphas} in {len(method.alpha)} steps: the largest values that clearly lower the samples' loss."


def _reason(alpha: float, curve: Sequence[CurveRecord]) -> str:
    best = min(curve, key=lambda point: (point.mean, point.alpha))
    if alpha == 0:
        return "no other value clearly lowers the samples' loss"
    if best.alpha > alpha:
        return "a larger alpha does not clearly lower the samples' loss"
    if alpha == max(point.alpha for point in curve):
        return "the samples' loss still falls there, and no larger alpha is tried"
    return "a larger alpha raises the samples' loss"


def candidates_sentence(method: MethodRecord) -> str | None:
    """Say which methods were compared for "auto", and what the samples say of each; None if there was one."""
    if not method.candidates:
        return None
    parts = []
    for one in method.candidates:
        name = "adding the change unchanged (naive)" if one.method == "naive" else f"aligning it ({one.method})"
        parts.append(f"{name} {'is held back' if one.held_back else f'gains {_gain_text(one.gain, method)}'}")
    return f"Tried on the samples: {', '.join(parts[:-1])}, and {parts[-1]}."


def _gain_text(gain: float, method: MethodRecord) -> str:
    by_class = any(point.accuracy is not None for point in method.curve)
    return f"{_rounded_points(gain)} points" if by_class else f"a loss lower by {gain:.2g}"


def lead_sentence(lead: SourceLeadRecord | None) -> str | None:
    """Return a warning if the fine-tuned source is not clearly better than the target on the samples' labels."""
    if lead is None or lead.is_clear:
        return None
    is_worse = lead.target - lead.source > lead.error
    state, follows = ("WORSE", "nothing") if is_worse else ("NOT clearly better", "little")
    return (
        f"The fine-tuned source is {state} than the target on the samples' labels: {lead.source:.1%} against "
        f"{lead.target:.1%} (± {100 * lead.error:.1f} points), so there is {follows} to gain."
    )


def held_back_sentence(record: Record) -> str:
    """Say why a port was held back."""
    method, samples = record.method, record.data.n if record.data is not None else 0
    if method.training is not None:
        tried = f"at most {count_text(method.training.most or 0, 'step')} on {count_text(samples, 'sample')}"
        return f"Held back: {method.name}, {tried}. No step clearly lowers the loss of the samples left out."
    if method.name == "readout":
        return (
            f"Held back: the readout, from {count_text(samples, 'sample')}. On samples left out of the fit, it does "
            "not bring the predictions closer to the source's."
        )
    what = " and ".join(dict.fromkeys([method.name, *(one.method for one in method.candidates)]))
    alphas = [method.alpha] if isinstance(method.alpha, float) else method.alpha
    tried = f"{what} with alpha chosen by {count_text(samples, 'sample')}"
    dropped = " The polish did not help on the samples left out." if method.polish and not method.polish.helped else ""
    if samples == 1:
        return f"Held back: {tried}. One sample cannot tell a gain from chance.{dropped}"
    if not any(alphas) or method.veto is None:
        return f"Held back: {tried}. No scale of the change clearly lowers the samples' loss.{dropped}"
    gain = _gain_text(method.veto.mean, method)
    scale = 100 if any(point.accuracy is not None for point in method.curve) else 1
    error = "" if method.veto.error is None else f" (± {scale * method.veto.error:.2g})"
    return f"Held back: {tried}. The samples gain {gain}{error}, which is not clearly more than zero.{dropped}"


def held_back_remedy(record: Record) -> str:
    """Say what to do about a port that was held back."""
    if record.method.training is not None or record.method.name == "readout":
        return "use more samples (-n, or unlabelled ones with --unlabelled), or port the change instead (--method auto)"
    other = "--method bico" if record.method.name != "bico" else "--method theseus"
    polishable = record.objective.name in LEARNABLE and not record.method.polish
    more = "-n, or unlabelled ones with --polish --unlabelled DATA" if polishable else "-n"
    return (
        f"use more samples ({more}), compare other methods ('hf-bico compare', or {other}), or write it anyway with "
        "--alpha 1, as the paper does"
    )
