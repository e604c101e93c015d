"""The page at `/docs`: which addresses there are, and the fields of their requests. It loads
nothing from elsewhere."""

from __future__ import annotations

from html import escape

from specgen.serve.requests import ChatRequest, Common, CompletionRequest

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem;
  color-scheme: light dark }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em }
pre { overflow-x: auto; padding: 0.8rem; border: 1px solid #8888 }
td { vertical-align: top; padding: 0.2rem 1rem 0.2rem 0 }
"""


def page(model: str, address: str) -> str:
    """Returns the page. `model` is the model's name, `address` the server's, with a slash at its
    end."""
    example = (
        f"curl {address}v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '  -d \'{"messages": [{"role": "user", "content": "Hello"}], "stream": true}\''
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>specgen serve</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>specgen serve</h1>
<p>This server generates text with <code>{escape(model)}</code>. It speaks OpenAI's protocol: give
its address, with <code>/v1</code> at the end, to any client.</p>
<pre>{escape(example)}</pre>
<p>If the server has a key, each request needs <code>Authorization: Bearer KEY</code>. Errors are
JSON: <code>error.message</code>, and <code>error.param</code> names the field.</p>
<h2>POST /v1/chat/completions</h2>
{_table(ChatRequest)}
<h2>POST /v1/completions</h2>
{_table(CompletionRequest)}
<h2>GET /v1/models, GET /health</h2>
<p>The model, and whether the server is there. <code>/health</code> needs no key.</p>
</body>
</html>
"""


def _table(kind: type[Common]) -> str:
    """Returns the fields of a request with what they mean; without those that only say that
    something cannot be asked for."""
    rows = [
        f"<tr><td><code>{name}</code></td><td>{escape(field.description)}</td></tr>"
        for name, field in kind.model_fields.items()
        if field.description
    ]
    return f"<table>\n{chr(10).join(rows)}\n</table>"
