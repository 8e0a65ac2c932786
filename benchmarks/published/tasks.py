"""What is asked: six tasks, each in eight variants, so that no text repeats within a round."""

from dataclasses import dataclass

CODE = (
    """def total(orders):
    t = 0
    for i in range(0, len(orders)):
        if orders[i]["paid"] == True:
            t = t + orders[i]["price"] * orders[i]["count"]
    return t""",
    """def parse_line(line):
    parts = line.split(",")
    name = parts[0].strip()
    age = int(parts[1].strip())
    if len(parts) > 2:
        city = parts[2].strip()
    else:
        city = None
    return {"name": name, "age": age, "city": city}""",
    """class Counter:
    def __init__(self):
        self.words = {}
    def add(self, text):
        for w in text.lower().split():
            if w in self.words:
                self.words[w] = self.words[w] + 1
            else:
                self.words[w] = 1
    def top(self, n):
        return sorted(self.words.items(), key=lambda p: -p[1])[:n]""",
    """def rotate(matrix):
    result = []
    for c in range(len(matrix[0])):
        row = []
        for r in range(len(matrix) - 1, -1, -1):
            row.append(matrix[r][c])
        result.append(row)
    return result""",
    """def find_path(graph, start, goal):
    queue = [[start]]
    seen = []
    while len(queue) > 0:
        path = queue.pop(0)
        if path[-1] == goal:
            return path
        for node in graph[path[-1]]:
            if node not in seen:
                seen.append(node)
                queue.append(path + [node])
    return None""",
    """class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance
    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance""",
    """def is_valid(text):
    stack = []
    for c in text:
        if c == "(" or c == "[" or c == "{":
            stack.append(c)
        if c == ")" or c == "]" or c == "}":
            if len(stack) == 0:
                return False
            o = stack.pop()
            if o + c != "()" and o + c != "[]" and o + c != "{}":
                return False
    return len(stack) == 0""",
    """def merge(a, b):
    out = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            out.append(a[i])
            i += 1
        else:
            out.append(b[j])
            j += 1
    return out + a[i:] + b[j:]""",
)
FUNCTIONS = (
    "returns the n-th Fibonacci number without recursion",
    "reads a CSV file and returns the mean of each numeric column",
    "tells whether two strings are anagrams, spaces and case aside",
    "converts Roman numerals to integers and refuses malformed ones",
    "returns the longest common prefix of a list of strings",
    "caches the results of another function for a given number of seconds",
    "flattens nested dictionaries into one with dotted keys",
    "finds all prime numbers below n with a sieve",
)
TOPICS = (
    "how a hash table resolves collisions",
    "why the sky is blue and sunsets are red",
    "what a transaction in a database guarantees",
    "how vaccines prepare the immune system",
    "the difference between a process and a thread",
    "why the moon always shows us the same side",
    "how public key encryption lets strangers share a secret",
    "what makes bread rise",
)
HEROES = (
    "a lighthouse keeper who finds a letter in a bottle",
    "a robot that learns to paint",
    "two sisters who inherit a small bookshop",
    "a baker who can taste the weather of tomorrow",
    "a fox that guides lost hikers home",
    "an astronaut who grows tomatoes on Mars",
    "a clockmaker whose clocks run backwards",
    "a child who befriends the river behind the house",
)
NUM_VARIANTS = len(CODE)


def _code(instruction: str) -> tuple[str, ...]:
    return tuple(f"{instruction}\n\n```python\n{code}\n```" for code in CODE)


TASKS = {
    "function": tuple(f"Write a Python function that {what}." for what in FUNCTIONS),
    "refactor": _code("Refactor this code so that it is shorter and clearer. Give all of it."),
    "tests": _code("Write tests with pytest for this code."),
    "translate": _code("Translate this code to JavaScript."),
    "explain": tuple(f"Explain in plain words {topic}." for topic in TOPICS),
    "story": tuple(f"Tell a story about {hero}." for hero in HEROES),
}
MIXED = "all"  # tasks at once


@dataclass(frozen=True, slots=True)
class Cell:
    """What is asked at once, or one after the other.

    Attributes:
        task: or MIXED.
    """

    task: str
    temperature: float
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.task}, T={self.temperature:g}, {self.concurrency} at once"


def cells_of_round(
    number: int, tasks: list[str], temperatures: list[float], concurrencies: list[int]
) -> dict[Cell, list[str]]:
    """The cells of a round with their prompts; two cells share a prompt only if all are used.

    With one request at a time a task has a cell of its own; more requests at once are of all tasks,
    eight, or as many as there are at once.
    """
    prompts = [
        (task, TASKS[task][(number + variant) % NUM_VARIANTS])
        for variant in range(NUM_VARIANTS)
        for task in tasks
    ]
    cells: dict[Cell, list[str]] = {}
    at = 0
    for concurrency in concurrencies:
        count = len(tasks) if concurrency == 1 else max(NUM_VARIANTS, concurrency)
        for temperature in temperatures:
            chosen = [prompts[(at + place) % len(prompts)] for place in range(count)]
            at += count
            if concurrency == 1:
                cells |= {Cell(task, temperature, 1): [text] for task, text in chosen}
            else:
                cells[Cell(MIXED, temperature, concurrency)] = [text for _, text in chosen]
    return cells
