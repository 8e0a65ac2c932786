// Texts to begin with: starts of Python modules, as the standard library has them.

export const EXAMPLES = [
  {
    label: "A class",
    text: `class TextFormatter:
    """Format paragraphs of text to a given width.

    The width is the number of characters in a line.
    """

    def __init__(self, width=70, indent=""):
`,
  },
  {
    label: "A function",
    text: `import os

def find_files(path, suffix):
    """Return a list of the files below path whose names end with suffix."""
`,
  },
  {
    label: "Tests",
    text: `import unittest

class StackTest(unittest.TestCase):

    def test_push(self):
        stack = Stack()
        stack.push(1)
        self.assertEqual(stack.pop(), 1)

    def test_empty(self):
`,
  },
];
