"""Function stubs to complete, made from MBPP's tasks (CC-BY-4.0): the signature, and a docstring of
the task with its first tests as examples.

    python infra/function_prompts.py mbpp.jsonl > functions.jsonl
"""

import ast
import json
import sys
from pathlib import Path


def stub(task: dict[str, str | list[str]]) -> str | None:
    """The stub of one task; None where its code or tests are not of the usual form."""
    code, tests, text = str(task["code"]).replace("\r", ""), task["test_list"], task["text"]
    try:
        body = ast.parse(code).body
        statements = [ast.parse(test).body[0] for test in tests[:2]]
    except (SyntaxError, IndexError):
        return None
    examples, name = [], None
    for statement in statements:
        compared = getattr(statement, "test", None)
        if not isinstance(compared, ast.Compare) or not isinstance(compared.left, ast.Call):
            return None
        examples += [f">>> {ast.unparse(compared.left)}", ast.unparse(compared.comparators[0])]
        name = ast.unparse(compared.left.func)
    imports = [ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines = [f"def {name}({ast.unparse(node.args)}):", f'    """ {text}']
            lines += [f"    {example}" for example in examples] + ['    """']
            return "\n".join([*imports, "\n"] * bool(imports) + lines) + "\n"
    return None


def main() -> None:
    for line in Path(sys.argv[1]).read_text().splitlines():
        if (prompt := stub(json.loads(line))) is not None:
            print(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
