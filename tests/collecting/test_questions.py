import csv
import json

import duckdb
import pytest

from conformal_arbitrage.collecting.questions import read_menus, read_requests
from conformal_arbitrage.errors import OptionError, ScoreLogError

PLANETS = [
    {"question": "Largest?", "choices": ["Mars", "Jupiter", "Venus"], "answer": "B"},
    {"question": "Nearest the sun?", "choices": ["Mercury", "Earth"], "answer": "A"},
    {"question": "Has rings?", "choices": ["Mars", "Earth", "Saturn"], "answer": "C"},
]
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
every_format = pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])


@pytest.fixture
def save(tmp_path):
    """Write rows to a file of some format; what is not text is JSON in CSV and has its own type in Parquet."""

    def write(ending, rows):
        lines = tmp_path / "rows.jsonl"
        lines.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        path = tmp_path / f"rows.{ending}"
        if ending == "parquet":
            source = f"read_json('{lines}', format='newline_delimited', convert_strings_to_integers=false)"
            with duckdb.connect() as connection:
                connection.execute(f"copy (select * from {source}) to '{path}'")
        elif ending == "csv":
            with path.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
                writer.writeheader()
                for row in rows:
                    writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})
        return path

    return write


def wide(rows):
    """The same questions with one column per option."""
    return [
        {**{k: v for k, v in row.items() if k != "choices"}, **dict(zip("pqr", row["choices"], strict=False))}
        for row in rows
    ]


@every_format
def test_a_column_of_options_gives_menus_of_different_lengths(save, ending):
    menus = read_menus(save(ending, PLANETS))
    assert [query.context for query in menus.queries] == ["Largest?", "Nearest the sun?", "Has rings?"]
    assert [query.actions for query in menus.queries] == [tuple(row["choices"]) for row in PLANETS]
    assert menus.labels == [1, 0, 2]
    assert menus.groups is None


@every_format
def test_one_column_per_option_gives_the_same_menus_in_the_order_of_the_columns_named(save, ending):
    path = save(ending, wide(PLANETS))
    menus = read_menus(path, choice_columns=["p", "q", "r"])
    assert [query.actions for query in menus.queries] == [tuple(row["choices"]) for row in PLANETS]
    assert menus.labels == [1, 0, 2]
    turned = read_menus(path, choice_columns=["q", "p", "r"])
    assert turned.queries[0].actions == ("Jupiter", "Mars", "Venus")


@every_format
def test_columns_may_have_other_names(save, ending):
    rows = [{"stem": r["question"], "menu": r["choices"], "gold": r["answer"], "key": f"k{n}", "topic": "sky"}
            for n, r in enumerate(PLANETS)]  # fmt: skip
    named = {"question_column": "stem", "choices_column": "menu", "answer_column": "gold", "id_column": "key"}
    menus = read_menus(save(ending, rows), **named, group_column="topic")
    assert [query.id for query in menus.queries] == ["k0", "k1", "k2"]
    assert menus.labels == [1, 0, 2]
    assert menus.groups == ["sky"] * 3


@every_format
@pytest.mark.parametrize(
    "answers", [["B", "A", "C"], ["b", " a ", "c"], [1, 0, 2], ["1", "0", "2"], ["Jupiter", "Mercury", "Saturn"]]
)
def test_answers_may_be_letters_indices_or_texts(save, ending, answers):
    rows = [{**row, "answer": answer} for row, answer in zip(PLANETS, answers, strict=True)]
    assert read_menus(save(ending, rows)).labels == [1, 0, 2]


@every_format
def test_questions_without_answers_have_no_labels(save, ending):
    rows = [{"question": row["question"], "choices": row["choices"]} for row in PLANETS]
    assert read_menus(save(ending, rows)).labels is None


@every_format
def test_ambiguous_answers_are_refused_unless_the_reading_is_specified(save, ending):
    rows = [{"question": "Largest?", "choices": ["1", "0", "2"], "answer": "0"}]
    path = save(ending, rows)
    with pytest.raises(
        OptionError, match=r"rows\.\w+: the answers can be read as index and as text; choose with --answer-is"
    ):
        read_menus(path)
    assert read_menus(path, answer_is="index").labels == [0]
    assert read_menus(path, answer_is="text").labels == [1]


def test_one_row_that_fits_a_single_reading_settles_the_whole_column(save):
    rows = [
        {"question": "Largest?", "choices": ["1", "0", "2"], "answer": "0"},
        {"question": "Next?", "choices": ["7", "8", "9"], "answer": "9"},
    ]
    assert read_menus(save("jsonl", rows)).labels == [1, 2]


def test_two_readings_that_agree_are_not_ambiguous(save):
    rows = [{"question": "Letter?", "choices": ["A", "B"], "answer": "B"}]
    assert read_menus(save("jsonl", rows)).labels == [1]


@every_format
@pytest.mark.parametrize("answer", ["D", "3", "Pluto", "-1", "AB", ""])
def test_an_answer_that_names_no_option_is_refused_with_its_row(save, ending, answer):
    rows = [*PLANETS[:2], {**PLANETS[2], "answer": answer}]
    with pytest.raises(ScoreLogError, match=r"row 3: the answer .* is not a letter.*--answer-column") as caught:
        read_menus(save(ending, rows))
    assert f"rows.{ending}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_reported_row_is_the_first_that_the_best_reading_cannot_parse(save):
    rows = [{**row, "answer": answer} for row, answer in zip(PLANETS, ["B", "Z", "C"], strict=True)]
    with pytest.raises(ScoreLogError, match="row 2: the answer 'Z'"):
        read_menus(save("jsonl", rows))


def test_a_specified_reading_is_the_only_one_tried(save):
    with pytest.raises(ScoreLogError, match="row 1: the answer 'B'"):
        read_menus(save("jsonl", PLANETS), answer_is="index")


@every_format
def test_ids_of_the_file_are_kept(save, ending):
    rows = [{"id": name, **row} for name, row in zip(["a", "007", "c d"], PLANETS, strict=True)]
    assert [query.id for query in read_menus(save(ending, rows)).queries] == ["a", "007", "c d"]


def test_ids_made_from_content_are_the_same_in_every_format_and_order(save):
    ids = [query.id for query in read_menus(save("jsonl", PLANETS)).queries]
    assert len(set(ids)) == 3
    for ending in ("csv", "parquet"):
        assert [query.id for query in read_menus(save(ending, PLANETS)).queries] == ids
    assert [query.id for query in read_menus(save("jsonl", PLANETS[::-1])).queries] == ids[::-1]
    assert [query.id for query in read_menus(save("csv", wide(PLANETS)), choice_columns="pqr").queries] == ids


def test_ids_made_from_content_depend_on_the_options_and_not_on_the_answer(save):
    name = read_menus(save("jsonl", PLANETS)).queries[0].id
    assert read_menus(save("jsonl", [{**PLANETS[0], "answer": "A"}])).queries[0].id == name
    other = {**PLANETS[0], "choices": ["Mars", "Jupiter", "Pluto"]}
    assert read_menus(save("jsonl", [other])).queries[0].id != name


def test_equal_rows_are_numbered(save):
    first, second, third = [query.id for query in read_menus(save("jsonl", [PLANETS[0]] * 3)).queries]
    assert (second, third) == (f"{first}-2", f"{first}-3")


@every_format
@pytest.mark.parametrize("names", [["a", "b", "a"], ["a", "", "c"]])
def test_duplicate_or_empty_ids_are_refused(save, ending, names):
    rows = [{"id": name, **row} for name, row in zip(names, PLANETS, strict=True)]
    with pytest.raises(ScoreLogError, match=rf"rows\.{ending}: the id '.?' is empty or not unique; make ids unique"):
        read_menus(save(ending, rows))


@every_format
def test_a_column_called_group_is_read_by_default(save, ending):
    rows = [{"group": name, **row} for name, row in zip("xyx", PLANETS, strict=True)]
    assert read_menus(save(ending, rows)).groups == ["x", "y", "x"]


@every_format
@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("question_column", "--question-column"),
        ("choices_column", "--choices-column or --choice-columns"),
        ("answer_column", "--answer-column"),
        ("id_column", "--id-column"),
        ("group_column", "--group-column"),
    ],
)
def test_a_missing_column_is_reported_with_the_existing_ones(save, ending, option, remedy):
    wanted = f"no column 'nothing'; it has answer, choices, question; name another with {remedy}"
    with pytest.raises(ScoreLogError) as caught:
        read_menus(save(ending, PLANETS), **{option: "nothing"})
    assert str(caught.value).endswith(wanted)
    assert f"rows.{ending}: " in str(caught.value)


def test_a_missing_choice_column_is_reported(save):
    with pytest.raises(ScoreLogError, match=r"no column 's'.*--choice-columns"):
        read_menus(save("csv", wide(PLANETS)), choice_columns=["p", "s"])


@every_format
@pytest.mark.parametrize("choices", [[], ["Mars", ""]])
def test_a_row_without_options_or_with_an_empty_one_is_refused(save, ending, choices):
    rows = [PLANETS[0], {"question": "None?", "choices": choices, "answer": "A"}]
    with pytest.raises(ScoreLogError, match=rf"rows\.{ending}: row 2 has no options or an empty one; correct that row"):
        read_menus(save(ending, rows))


def test_options_that_are_not_a_list_are_refused(save):
    with pytest.raises(
        ScoreLogError, match=r"rows\.parquet: column 'choices' holds no lists; write choices as a JSON list"
    ):
        read_menus(save("parquet", [{"question": "q", "choices": 7}]))


def test_text_that_is_not_a_list_of_options_is_refused_with_the_file(save):
    with pytest.raises(ScoreLogError, match=r"rows\.csv"):
        read_menus(save("csv", [{"question": "q", "choices": "Mars, Venus"}]))


def test_the_first_rows_keep_their_labels_and_groups(save):
    menus = read_menus(save("jsonl", [{"group": "g", **row} for row in PLANETS])).first(2)
    assert ([q.context for q in menus.queries], menus.labels, menus.groups) == (
        ["Largest?", "Nearest the sun?"], [1, 0], ["g", "g"],
    )  # fmt: skip
    assert len(read_menus(save("jsonl", PLANETS)).first(None).queries) == 3


def test_a_missing_file_and_a_file_of_another_kind_are_one_line_each(tmp_path):
    with pytest.raises(ScoreLogError, match=r"no\.jsonl: there is no such file"):
        read_menus(tmp_path / "no.jsonl")
    with pytest.raises(ScoreLogError, match=r"q\.xlsx: unknown kind of file; name it \.parquet"):
        read_requests(tmp_path / "q.xlsx")


@every_format
def test_requests_keep_their_messages_tools_and_response_format(save, ending):
    row = {
        "messages": [{"role": "system", "content": "Brief."}, *HELLO],
        "tools": TOOLS,
        "response_format": {"type": "json_object"},
        "parallel_tool_calls": False,
        "expected": "Hi",
        "comment": "not sent",
    }
    requests = read_requests(save(ending, [row]))
    body = {k: v for k, v in row.items() if k not in ("expected", "comment")}
    assert requests.requests[0].body == body
    assert requests.expected == ["Hi"]


@every_format
def test_empty_values_are_not_sent(save, ending):
    rows = [{"messages": HELLO, "tools": TOOLS}, {"messages": HELLO, "tools": None}]
    requests = read_requests(save(ending, rows))
    assert [set(request.body) for request in requests.requests] == [{"messages", "tools"}, {"messages"}]
    assert requests.expected is None


@every_format
def test_a_tool_choice_by_name_is_kept(save, ending):
    choice = {"type": "function", "function": {"name": "weather"}}
    requests = read_requests(save(ending, [{"messages": HELLO, "tools": TOOLS, "tool_choice": choice}]))
    assert requests.requests[0].body["tool_choice"] == choice


@every_format
def test_a_plain_question_becomes_a_message_of_the_user(save, ending):
    rows = [{"ask": "Hello", "gold": "Hi", "id": "x", "group": "g"}]
    requests = read_requests(save(ending, rows), question_column="ask", answer_column="gold")
    assert requests.requests[0].body == {"messages": HELLO}
    assert (requests.requests[0].id, requests.expected, requests.groups) == ("x", ["Hi"], ["g"])


@every_format
def test_expected_tool_calls_are_kept_as_json(save, ending):
    calls = [{"name": "weather", "arguments": {"city": "Oslo"}}]
    requests = read_requests(save(ending, [{"messages": HELLO, "expected": calls}]))
    assert json.loads(requests.expected[0]) == calls


def test_ids_of_requests_are_made_from_the_whole_request(save):
    rows = [{"messages": HELLO}, {"messages": HELLO, "tools": TOOLS}, {"messages": HELLO}]
    first, second, third = [request.id for request in read_requests(save("jsonl", rows)).requests]
    assert first != second
    assert third == f"{first}-2"


def test_the_first_requests_keep_their_expected_answers(save):
    rows = [{"messages": HELLO, "expected": name, "group": name} for name in "xyz"]
    requests = read_requests(save("jsonl", rows)).first(2)
    assert (len(requests.requests), requests.expected, requests.groups) == (2, ["x", "y"], ["x", "y"])


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_settings_are_read_with_the_request_in_one_form(save, ending):
    settings = [
        {"temperature": 0, "stop": "END", "logit_bias": {"5": 1}, "max_tokens": 5},
        {"temperature": 0.5, "stop": "5", "logit_bias": {"7": -2.5}, "max_tokens": None},
    ]
    first, second = [r.body for r in read_requests(save(ending, [{"messages": HELLO, **s} for s in settings])).requests]
    assert json.dumps({name: first[name] for name in settings[0]}) == (
        '{"temperature": 0.0, "stop": "END", "logit_bias": {"5": 1}, "max_tokens": 5}'
    )
    assert second == {"messages": HELLO, "temperature": 0.5, "stop": "5", "logit_bias": {"7": -2.5}}


def test_a_list_of_stops_is_a_list_and_a_column_that_is_no_setting_is_named(save):
    [request] = read_requests(save("jsonl", [{"messages": HELLO, "stop": ["a", "b"]}])).requests
    assert request.body["stop"] == ["a", "b"]
    rows = [{"messages": HELLO, "temperature": 21.5}]
    with pytest.raises(
        ScoreLogError, match=r"row 1: temperature must be a number from 0 to 2; got 21\.5; correct it, or rename"
    ):
        read_requests(save("jsonl", rows))


@pytest.mark.parametrize("messages", ["Hello", '[{"role": "user"'])
def test_messages_that_are_not_json_are_refused_with_their_row(save, messages):
    rows = [{"messages": json.dumps(HELLO)}, {"messages": messages}]
    with pytest.raises(ScoreLogError, match=r"rows\.csv: row 2: messages must be JSON"):
        read_requests(save("csv", rows))


@pytest.mark.parametrize("messages", [{"role": "user"}, [], ["Hello"], [{"content": "Hello"}], None, 7])
def test_messages_that_are_not_a_conversation_are_refused_with_an_example(save, messages):
    rows = [{"messages": json.dumps(HELLO)}, {"messages": json.dumps(messages)}]
    with pytest.raises(ScoreLogError, match=r'row 2: messages must be a list such as \[\{"role": "user"'):
        read_requests(save("csv", rows))


@every_format
def test_requests_without_messages_name_the_option_for_a_question_column(save, ending):
    with pytest.raises(ScoreLogError, match=r"no column 'messages'; it has ask; name another with --question-column"):
        read_requests(save(ending, [{"ask": "Hello"}]))


@every_format
@pytest.mark.parametrize("choice", ["auto", "none", "required"])
def test_a_tool_choice_given_as_a_word_is_kept(save, ending, choice):
    requests = read_requests(save(ending, [{"messages": HELLO, "tools": TOOLS, "tool_choice": choice}]))
    assert requests.requests[0].body["tool_choice"] == choice


def test_digits_that_are_not_decimal_are_read_as_text(save):
    rows = [{"question": "Square metres are written m and what?", "choices": ["²", "³"], "answer": "³"}]
    assert read_menus(save("jsonl", rows)).labels == [1]


@pytest.mark.parametrize("answer", ["B", "1"])
def test_an_empty_option_before_a_filled_one_is_refused_because_letters_would_shift(save, answer):
    rows = [{"question": "q", "p": "x", "q": "", "r": "y", "answer": answer}]
    with pytest.raises(ScoreLogError, match="row 1"):
        read_menus(save("csv", rows), choice_columns=["p", "q", "r"])


TALK = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Which?"}]


@every_format
def test_a_menu_s_question_may_be_a_conversation(save, ending):
    rows = [{"messages": TALK, "choices": ["a", "b"]}, {"messages": TALK[1:], "choices": ["a", "b"]}]
    [talk, plain] = read_menus(save(ending, rows)).queries
    assert (talk.context, plain.context) == (TALK, "Which?")


def test_the_same_question_has_the_same_id_as_text_and_as_one_message(save):
    [one] = read_menus(save("jsonl", [{"question": "Which?", "choices": ["a", "b"]}])).queries
    [other] = read_menus(save("jsonl", [{"messages": TALK[1:], "choices": ["a", "b"]}])).queries
    assert one == other


def test_a_question_column_comes_before_messages_unless_messages_are_named(save):
    path = save("jsonl", [{"question": "What?", "messages": TALK, "choices": ["a", "b"]}])
    assert read_menus(path).queries[0].context == "What?"
    assert read_menus(path, question_column="messages").queries[0].context == TALK


def test_nulls_of_a_nested_column_are_no_part_of_a_message(save):
    rows = [{"messages": [{**TALK[1], "name": "Ann"}], "expected": "x"}, {"messages": TALK, "expected": "x"}]
    requests = read_requests(save("parquet", rows)).requests
    assert [request.messages for request in requests] == [[{**TALK[1], "name": "Ann"}], TALK]


@every_format
def test_a_fixed_set_of_options_is_given_to_every_row(save, ending):
    rows = [{"question": "x", "label": "bug"}, {"question": "y", "label": "other"}]
    menus = read_menus(save(ending, rows), choices=["billing", "bug", "other"])
    assert [query.actions for query in menus.queries] == [("billing", "bug", "other")] * 2
    assert (menus.labels, menus.answer_column) == ([1, 2], "label")


def test_fixed_options_and_a_column_of_options_do_not_go_together(save):
    with pytest.raises(OptionError, match="drop --choice-columns and --choices-column"):
        read_menus(save("jsonl", PLANETS), choices=["a", "b"], choices_column="choices")


def test_a_label_column_without_answers_can_be_left_alone(save):
    path = save("jsonl", [{"question": "x", "choices": ["a", "b"], "label": "urgent"}])
    with pytest.raises(ScoreLogError, match="'' if there are no answers"):
        read_menus(path)
    assert read_menus(path, answer_column="").labels is None


def test_answers_in_text_form_are_found_by_their_usual_names(save):
    rows = [{"messages": TALK, "answer": "x", "label": "y"}]
    assert read_requests(save("jsonl", rows)).expected == ["x"]
    assert read_requests(save("jsonl", [{**rows[0], "expected": "z"}])).answer_column == "expected"
