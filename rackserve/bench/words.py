"""Words of which prompts for endpoints that take text are made: each, with the space before it, is one token nearly everywhere.

So a prompt sent as text is about as long as it was meant to be, whatever model answers. They were checked with SmolLM2's and
DeepSeek's vocabularies. There are fewer words than token ids; blocks with other ids still have other words, as 16 tokens would
have to agree in all 16.
"""

from __future__ import annotations

_LINES = """
the of and to in is that for it with as was on be at by this had not are but from or have an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about
into than them can only other new some could time these two may then do first any my now such like our over
man me even most made after also did many before must through back years where much your way well down should
because each just those people how too little state good very make world still own see men work long get here
between both life being under never day same another know while last might us great old year off come since
against go came right used take three states himself few house use during without again place around however
home small found thought went say part once general high upon school every does got united left number course
war until always away something fact though water less public put thing almost hand enough far took head yet
government system better set told nothing night end why called eyes find going look asked later knew point
next city business give group days young let room present second country side possible given form often things
along large children white case important family early face national power best light open others line rather
able felt order done half north name words seen
"""
WORDS = tuple(_LINES.split())


def word_of(token: int) -> str:
    """The text that stands for a token id, with the space before it."""
    return f" {WORDS[token % len(WORDS)]}"
