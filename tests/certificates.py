"""Certificates with fields changed, wherever they stand, as a forger or a careless program would change them."""

import json
from dataclasses import replace

from msgspec import structs

from conformal_arbitrage.calibration import promises

PARTS = {
    "rule": (promises.Threshold, promises.ByGroup, promises.Learned, promises.Path),
    "promise": (promises.Average, promises.Confident, promises.Dial, promises.Cluster, promises.PerSession),
    "loss": (promises.Regret, promises.Net, promises.Own),
    "evidence": (promises.Evidence,),
    "provenance": (promises.Provenance,),
}
PLACES = {name: part for part, kinds in PARTS.items() for kind in kinds for name in kind.__struct_fields__}


def edited(document, changes):
    """Return a certificate's document with fields changed in the parts that they belong to."""
    copy = json.loads(json.dumps(document))
    for name, value in changes.items():
        (copy[PLACES[name]] if name in PLACES else copy)[name] = value
    return copy


def altered(certificate, **changes):
    """Return a certificate with fields changed in the parts that they belong to; its words stay."""
    for name, value in changes.items():
        if name in PLACES:
            part = PLACES[name]
            certificate = replace(certificate, **{part: structs.replace(getattr(certificate, part), **{name: value})})
        else:
            certificate = replace(certificate, **{name: value})
    return certificate


def said(document, name):
    """Return what a certificate's document says under a name, in whichever part; None if it leaves that out."""
    return (document[PLACES[name]] if name in PLACES else document).get(name)
