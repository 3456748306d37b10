"""Twenty questions of our own, as menus and as requests."""

MENUS = [
    ("Which of these can fly?", ["a sparrow", "a stone", "a spoon", "a shoe"], 0),
    ("What do people wear on their feet?", ["hats", "shoes", "gloves", "scarves"], 1),
    ("Which number is the largest?", ["two", "five", "nine", "one"], 2),
    ("What falls from clouds?", ["sand", "paper", "wood", "rain"], 3),
    ("Which of these is a fruit?", ["an apple", "a chair", "a river", "a song"], 0),
    ("Where do fish live?", ["in trees", "in water", "in books", "in ovens"], 1),
    ("What do we use to write?", ["a pillow", "a ladder", "a pencil", "a bucket"], 2),
    ("Which of these is cold?", ["fire", "steam", "the sun", "ice"], 3),
    ("How many legs has a dog?", ["four", "two", "nine", "none"], 0),
    ("What colour is grass?", ["purple", "green", "white", "black"], 1),
    ("Which of these tells the time?", ["a fork", "a carpet", "a clock", "a leaf"], 2),
    ("What do bees make?", ["bread", "cheese", "wine", "honey"], 3),
    ("Which season is the hottest?", ["summer", "winter", "autumn", "spring"], 0),
    ("What do you open with a key?", ["a cloud", "a lock", "a meal", "a joke"], 1),
    ("Which of these is a tool?", ["a poem", "a dream", "a hammer", "a smell"], 2),
    ("What shines at night?", ["a potato", "a sock", "a brick", "the moon"], 3),
    ("What do cows eat?", ["grass", "iron", "glass", "paper"], 0),
    ("Which of these is a musical instrument?", ["a plate", "a violin", "a towel", "a door"], 1),
    ("What is frozen water called?", ["mud", "dust", "ice", "oil"], 2),
    ("Who flies an aeroplane?", ["a baker", "a tailor", "a gardener", "a pilot"], 3),
]

REQUESTS = [
    {
        "id": f"request-{k}",
        "messages": [{"role": "user", "content": f"{question} Choose from: {', '.join(menu)}. Answer briefly."}],
        "expected": menu[right].split()[-1],
        "max_tokens": 16,
    }
    for k, (question, menu, right) in enumerate(MENUS)
]
