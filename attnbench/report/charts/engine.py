"""A process that draws charts with vl-convert, one call per line of JSON; style.py starts it. vl-convert's JavaScript
engine ends its process when it runs out of memory."""

import base64
import json
import sys

import vl_convert


def serve() -> None:
    """Answer each line of standard input (name of a function, arguments) with one line."""
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            drawn = getattr(vl_convert, name)(**arguments)
            answer = {"text": drawn} if isinstance(drawn, str) else {"base64": base64.b64encode(drawn).decode()}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
