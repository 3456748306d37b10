"""inspect_ai: an approver of tool calls that approves under a certificate, and else passes the call on to the next approver.

    Task(..., approval=[ApprovalPolicy(conformal("certificate.json", sure), "*"), ApprovalPolicy(human_approver(), "*")])

The certificate is one in router form, of graded tool calls: the Primary is the agent, the Guardian the next approver.
"""

from collections.abc import Callable
from typing import Any

from inspect_ai.approval import Approval, Approver, approver
from inspect_ai.model import ChatMessage
from inspect_ai.tool import ToolCall, ToolCallView

from conformal_arbitrage import Certificate


@approver(name="conformal")
def conformal(certificate: str, confidence: Callable[[ToolCall], float | None]) -> Approver:
    """Approve calls that stand alone, escalate the others.

    Args:
        certificate: the certificate's file.
        confidence: takes a tool call and returns how sure you are that it is right; None escalates.
    """
    rule = Certificate.load(certificate)

    async def approve(message: str, call: ToolCall, view: ToolCallView, history: list[ChatMessage]) -> Approval:
        sure = confidence(call)
        deferred = rule.decide([0, sure]).deferred
        details: dict[str, Any] = {"confidence": sure, "relaxation": rule.relaxation}
        return Approval(decision="escalate" if deferred else "approve", metadata=details)

    return approve
