"""Exit with 0 if a health page answers 200, else with 1 and what it said: ``healthcheck.py URL``.

For images without curl. ``/readyz`` is 200 while ready and while degraded: a degraded process serves and must not be
restarted for it.
"""

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 3.0


def main(url: str) -> int:
    """Ask ``url`` once."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:  # noqa: S310 - the image's own constant
            return say(response.read(), 0)
    except urllib.error.HTTPError as error:
        return say(error.read(), 1)
    except OSError as error:
        return say(str(error).encode(), 1)


def say(answer: bytes, status: int) -> int:
    """What ``docker inspect`` shows of a check, and the status that it ends with."""
    sys.stdout.write(answer.decode(errors="replace"))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
