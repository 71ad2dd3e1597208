"""Renders chat templates, one JSON request a line on stdin, one JSON reply a line on stdout. The only importer of jinja2.

A template is a program out of a checkpoint. Jinja's sandbox keeps it from files and from Python's internals but not from looping for ever
or from `'x' * 10**12`, and inside the trainer nothing could stop that. A process of its own has a clock and a memory limit that the kernel
keeps: `hub/chat.py` runs this file as a script, without importing the package.
"""

import datetime
import functools
import json
import os
import resource
import signal
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

MEMORY = 2**30  # bytes of address space; a render takes about a tenth
SOURCE = 2**20  # characters of a template; the largest known one has some 20,000


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote. Which tokens were sampled is known here already: the tag only opens a scope."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def raise_exception(message):
    raise jinja2.TemplateError(message)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(form):
    return datetime.datetime.now().strftime(form)


@functools.lru_cache(maxsize=8)
def compiled(source):
    if len(source) > SOURCE:
        raise ValueError(f"found {len(source)} characters, need at most {SOURCE}")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def render(source, variables, limit):
    """Text of at most `limit` characters."""
    pieces, size = [], 0
    for piece in compiled(source).generate(variables):
        size += len(piece)
        if size > limit:
            raise ValueError(f"found more than {limit} characters of text, need fewer")
        pieces.append(piece)
    return "".join(pieces)


def main():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even within one long operation
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which closes stdin as it goes
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["seconds"])
        try:
            reply = {"text": render(request["template"], request["variables"], request["limit"])}
        except jinja2.TemplateSyntaxError as error:
            reply = {"error": f"line {error.lineno}: {error.message}"}
        except MemoryError:
            reply = {"error": f"found no end within {MEMORY} bytes of memory"}
        except Exception as error:  # whatever a template can provoke
            reply = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        text = json.dumps(reply)
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(text + "\n")
        out.flush()


if __name__ == "__main__":
    main()
