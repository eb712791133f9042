"""Makes the tokens before an answer of what a user writes: a question, or a conversation as JSON."""

import json
from collections.abc import Callable

from mpjax.data.text.instructions import Chat, checked_messages
from mpjax.errors import UsageError


def start_of_answer(chat: Chat) -> Callable[[str], list[int]]:
    """Makes the function from a prompt to its tokens, by the chat template.

    A prompt is the text of one message of the role `user`, or a JSON list of messages, as in `[{"role": "system",
    "content": "Be brief."}, {"role": "user", "content": "What is JAX?"}]`.
    """

    def start(text: str) -> list[int]:
        if not text.lstrip().startswith("[{"):
            return chat.prompt([{"role": "user", "content": text}])
        try:
            messages = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"a prompt that begins with [{{ is no JSON ({error}): wanted a list of messages, as in "
                '[{"role": "user", "content": "..."}]'
            ) from error
        return chat.prompt(checked_messages(messages, "a prompt"))

    return start
