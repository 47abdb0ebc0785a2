"""The agent that is a command: nothing but Python's standard library, and what its environment says."""

import json
import os
import sys
import urllib.request


def ask(messages: list[dict]) -> dict:
    tool = {"type": "function", "function": {"name": "paint", "parameters": {"type": "object"}}}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "m", "messages": messages, "tools": [tool]}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["choices"][0]["message"]


messages = [{"role": "user", "content": f"Paint room {json.load(sys.stdin)['room']}."}]
answer = ask(messages)
calls = answer.get("tool_calls") or []
colour = json.loads(calls[0]["function"]["arguments"]).get("colour") if calls else None
if calls:
    ask([*messages, answer, {"role": "tool", "tool_call_id": calls[0]["id"], "content": f"It is {colour}."}])
print(float(colour == "blue"))
