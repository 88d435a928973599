"""Chart engine: a process of its own that draws charts with vl-convert, call by call, from lines of JSON.

look.py starts this file. The JavaScript engine inside vl-convert ends its process where it gets no memory.
"""

import base64
import json
import sys

import vl_convert


def serve() -> None:
    """Answer each line of standard input, the name of a function and its arguments, with one line."""
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
