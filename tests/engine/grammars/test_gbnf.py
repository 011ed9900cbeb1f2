"""GBNF as llama.cpp reads it: character by character."""

from __future__ import annotations

import pytest

from engine.grammars.gbnf import GbnfError, gbnf_to_lark
from engine.wire.structured_outputs import StructuredOutputsParams
from tests.engine.grammars.matching import grammar_matcher, takes_text

JSON = r"""# as in llama.cpp's examples
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("grammar", "taken", "refused"),
    [
        # escapes
        (r'root ::= "d\u00e9cade"', ["décade"], ["d\\u00e9cade", "dຜade"]),
        (r'root ::= "\U0001F600\x41\u0042"', ["😀AB"], []),
        (r'root ::= "\ud83d\ude00"', ["😀"], []),
        (r'root ::= "\t\r\n\\\"\[\]"', ['\t\r\n\\"[]'], []),
        (r'root ::= "\'\-\/\."', ["'-/."], []),
        (r'root ::= "\x00\x1f"', ["\0\x1f"], []),
        ('root ::= "a\nb"', ["a\nb"], ["ab", "a\\nb"]),
        ('root ::= "/" [/] "#" # a comment with "quotes"', ["//#"], []),
        ('root ::= "<" "{" "}" ">" ";" "%"', ["<{}>;%"], []),
        # names
        ('root ::= Name NAME name\nName ::= "a"\nNAME ::= "b"\nname ::= "c"', ["abc"], ["aaa"]),
        ('root ::= a-b a_b fooBar foo-bar\na-b ::= "1"\na_b ::= "2"\nfooBar ::= "3"\nfoo-bar ::= "4"', ["1234"], []),
        ('root ::= start "b"\nstart ::= "a"', ["ab"], ["a"]),
        ('root ::= 1st größe\n1st ::= "a"\ngröße ::= "b"', ["ab"], []),
        ('root ::= rule_1 group_1\nrule_1 ::= "a"\ngroup_1 ::= ("b")', ["ab"], []),
        ('root ::= "a" | root "b"', ["a", "abb"], ["b"]),
        ('root ::= x\nx ::= "a"\nx ::= "b"', ["b"], ["a"]),
        # classes
        ("root ::= [a-c]+", ["abc"], ["d", ""]),
        (r"root ::= [\u00e0-\u00ff\]\\^-]", ["é", "]", "\\", "^", "-"], ["a"]),
        (r"root ::= [^\n\x22-]", ["a", "é", "\t"], ["\n", '"', "-"]),
        ("root ::= [^]", ["a", "\n"], ["", "ab"]),
        ("root ::= [a-] [-a]", ["a-", "-a"], ["b-"]),
        ("root ::= [a\\-c]", ["a", "-", "c"], ["b"]),
        ("root ::= [あ-ん]", ["か"], ["a"]),
        ("root ::= . .", ["a\n", "😀é"], ["a"]),
        # repetitions
        ('root ::= "ab"* "c"?', ["", "ababc", "c"], ["abb", "a"]),
        ('root ::= "a"{2} ("b"){1,} [c]{0,2} "d"{ 1 , 2 }', ["aabd", "aabbccdd"], ["abd", "aad", "aabcccd"]),
        ('root ::= "a"{,2} "b"', ["b", "aab"], ["aaab"]),
        ('root ::= ("a"+)+ ("b"*)*', ["aaabb"], ["b"]),
        ('root ::= "ab"{2}', ["abab"], ["abb"]),
        ('root ::= ("a" | "b" "c")+', ["abca"], ["ac"]),
        # layout
        ('root ::= "a" |\n  "b"', ["a", "b"], ["ab"]),
        ('root ::=\n  "a"\n  | "b"\n\n\nx ::= "c"', ["a", "b"], ["c"]),
        ('root ::= ( "a"\n  "b" ) \r\n', ["ab"], []),
        ('root::="a"("b"|)', ["a", "ab"], []),
        ("root ::=", [""], ["a"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= " + "(" * 99 + '"a"' + ")" * 99, ["a"], []),
        # what follows does not depend on how much one could take before
        ('root ::= word "b"\nword ::= [a-z]+', ["aab", "bb"], ["b"]),
        ('root ::= "a"* "aa"', ["aa", "aaaaa"], ["a"]),
        ('root ::= ("a" | "ab") ("c" | "bc")', ["ac", "abc", "abbc"], ["ab"]),
        ('root ::= .* "end"', ["end", "the end"], ["ends"]),
        (JSON, ['{"a": [1, -2.5e1, "x\\"y", {}], "b": null}'], ["[1]", '{"a": 01}', '{"a":  1}']),
        # tokens, which are bytes here
        ("root ::= <[97]> !<[97]>", ["ab"], ["aa"]),
    ],
)
def test_grammar_takes_what_llama_cpp_takes(grammar, taken, refused):
    matcher = grammar_matcher(grammar)
    assert [text for text in taken if not takes_text(matcher, text)] == []
    assert [text for text in refused if takes_text(matcher, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("root = nothing", "Expected NAME ::= 'root' in line 1"),
        ("nothing", "Expected NAME ::= 'nothing' in line 1"),
        ('x ::= "a"', "there is no rule root"),
        ('root ::= "a"\n  missing', "there is no rule missing"),
        ('root ::= "a', "Unexpected '\"a' in line 1"),
        ("root ::= [a", "Unexpected '[a' in line 1"),
        ('root ::= ("a"', "Expected ) for '(' in line 1"),
        ('root ::= "a")', "Expected a rule ')' in line 1"),
        ('root ::= "a"\n\n  | * "b"', "Expected something to repeat before '*' in line 3"),
        ('root ::= "a"{}', "Expected a number in '{}' in line 1"),
        ('root ::= "a"{b}', "Unexpected '{b}' in line 1"),
        (r'root ::= "\q"', r"Expected another escape than \q in"),
        (r'root ::= "\x4"', "Expected 2 hexadecimal digits of a character instead of 4 in"),
        (r'root ::= "\U00110000"', "Expected 8 hexadecimal digits"),
        (r'root ::= "\ud83d"', "Expected no half of a character"),
        ("root ::= [z-a]", "Expected a range upwards in '[z-a]' in line 1"),
        ("root ::= !<x>", "Expected the id of a token"),
        ("root ::= " + "(" * 5000, "Expected at most 100 groups inside each other"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_is_no_gbnf_is_refused_with_the_place(grammar, reason):
    with pytest.raises(GbnfError) as caught:
        gbnf_to_lark(grammar)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "is_gbnf"),
    [
        ('root ::= "a"', True),
        ('  start ::= "a"', True),
        ('start\n::= "a"', True),
        ('root ::= "a\nstart: b"', True),
        ("nothing of the kind", True),
        ('start: "a"', False),
        ('?start: "a"', False),
        ('!start: "a"', False),
        ('  start [lazy] : "a"', False),
        ("start[max_tokens=5]: /a+/", False),
        ('%llguidance {}\nstart: "::="', False),
        ('x: "a"\n%ignore " "\nstart: x', False),
    ],
)
def test_gbnf_is_told_from_lark_by_its_rules(grammar, is_gbnf):
    assert StructuredOutputsParams(grammar=grammar).is_gbnf == is_gbnf
