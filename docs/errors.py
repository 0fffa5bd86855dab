"""The table of error codes, read from the source: `python docs/errors.py --markdown`."""

import ast
import pathlib
import re

PACKAGE = pathlib.Path(__file__).parents[1] / "axon_dist"


def message(node):
    """The text of an error as it is written, with the names of values in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            x.value if isinstance(x, ast.Constant) else "{" + ast.unparse(x.value) + "}"
            for x in node.values
        )
    if isinstance(node, ast.BinOp):
        return message(node.left) + message(node.right)
    return "{" + ast.unparse(node) + "}"


def errors():
    """Code, class and message of every error that has a code, sorted by code."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            codes = [x.value for x in node.keywords if x.arg == "code"]
            if codes and isinstance(codes[0], ast.Constant) and codes[0].value:
                kind = ast.unparse(node.func).rpartition(".")[2]
                found.add((codes[0].value, kind, message(node.args[0])))
    return sorted(found)


if __name__ == "__main__":
    print("| code | class | message |\n|---|---|---|")
    for code, kind, text in errors():
        # Braces in code, because Markdown gives some of what is within them a meaning.
        text = re.sub(r"(\{[^}]*\})", r"`\1`", text).replace("|", "\\|").replace("\n", " ")
        print(f"| `{code}` | {kind} | {text} |")
