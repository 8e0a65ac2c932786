// Texts to begin with: starts of Python modules in the manner of the standard library.

export const EXAMPLES = [
  {
    label: "A class",
    text: `import threading

class Counter:
    """Count events from any number of threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._count = 0

    def`,
  },
  {
    label: "A function",
    text: `import os

def find_files(path, suffix):
    """Return a list of the files below path whose names end with suffix."""
    result = []
    for name in os.listdir(path):`,
  },
  {
    label: "Exceptions",
    text: `class Error(Exception):
    """Base class for all exceptions of this module."""

class ParsingError(Error):
    """Raised when a file does not follow legal syntax."""

    def __init__(self, source):`,
  },
  {
    label: "Tests",
    text: `import unittest

class StackTest(unittest.TestCase):

    def test_push(self):
        s = Stack()
        s.push(1)
        self.assertEqual(s.pop(), 1)

    def test_empty(self):`,
  },
];
