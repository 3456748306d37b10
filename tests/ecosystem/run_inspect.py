"""Run a task of inspect_ai whose tool calls are approved under a certificate, or rejected by the next approver."""

import json
import os
from importlib.metadata import version

from inspect_ai import Task, eval
from inspect_ai.approval import ApprovalPolicy, auto_approver
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import match
from inspect_ai.solver import basic_agent
from inspect_ai.tool import tool
from inspect_approver import conformal

USAGE = ModelUsage(input_tokens=10, output_tokens=1, total_tokens=11)
paid = []


@tool
def refund():
    async def execute(amount: int) -> str:
        """Refund an amount.

        Args:
            amount: how much.
        """
        paid.append(amount)
        return "paid"

    return execute


def call(name, **arguments):
    output = ModelOutput.for_tool_call("mockllm/model", name, arguments)
    output.usage = USAGE
    return output


def main():
    outputs = [call("refund", amount=5), call("refund", amount=500), call("submit", answer="done")]
    policies = [
        ApprovalPolicy(
            conformal(os.environ["CERTIFICATE"], lambda one: 0.1 if one.arguments["amount"] > 100 else 0.9), "refund"
        ),
        ApprovalPolicy(auto_approver(decision="reject"), "refund"),
        ApprovalPolicy(auto_approver(), "submit"),
    ]
    task = Task(
        dataset=MemoryDataset([Sample(input="Refund them.", target="done")]),
        solver=basic_agent(tools=[refund()]), scorer=match(), approval=policies,
    )  # fmt: skip
    [log] = eval(task, model=get_model("mockllm/model", custom_outputs=outputs), log_dir="logs", display="none")
    assert log.status == "success", log.error
    decisions = [(e.approver, e.decision) for e in log.samples[0].events if e.event == "approval"]
    assert paid == [5], paid
    assert [decision for _, decision in decisions] == ["approve", "escalate", "reject", "approve"], decisions
    print(
        json.dumps(
            {"package": "inspect-ai", "version": version("inspect-ai"), "run": "approval of tool calls", "error": None}
        )
    )


if __name__ == "__main__":
    main()
