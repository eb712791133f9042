"""What `mpjax.data.text` offers."""

from mpjax.data.text.answer_pairs import preferences as preferences
from mpjax.data.text.blocks import Blocks as Blocks
from mpjax.data.text.blocks import tokenized as tokenized
from mpjax.data.text.chat_template import ChatTemplate as ChatTemplate
from mpjax.data.text.chat_template import template_beside as template_beside
from mpjax.data.text.given import given_texts as given_texts
from mpjax.data.text.given import require_tables as require_tables
from mpjax.data.text.given import stored_texts as stored_texts
from mpjax.data.text.given import texts_of_table as texts_of_table
from mpjax.data.text.instructions import conversations as conversations
from mpjax.data.text.instructions import load_chat as load_chat
from mpjax.data.text.instructions import messages_of as messages_of
from mpjax.data.text.pairs import text_pairs as text_pairs
from mpjax.data.text.plain_tokenizers import BytesTokenizer as BytesTokenizer
from mpjax.data.text.plain_tokenizers import WordsTokenizer as WordsTokenizer
from mpjax.data.text.template import Template as Template
from mpjax.data.text.tokenizers import HuggingFaceTokenizer as HuggingFaceTokenizer
from mpjax.data.text.tokenizers import load_tokenizer as load_tokenizer
from mpjax.data.text.written import Written as Written
