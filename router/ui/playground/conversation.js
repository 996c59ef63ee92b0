// A conversation: turns of a prompt, or of results of calls, each with the answers of one or two sides.

// Conversations of earlier versions of the page have no sides.
export function upgrade(conversation) {
  for (const turn of conversation.turns) {
    turn.sides ??= turn.answers.length;
    turn.answers.forEach((answer, index) => {
      answer.side ??= index;
      answer.calls ??= [];
      answer.reasoning ??= "";
    });
  }
  return conversation;
}

// The answer that a side goes on from: a side that was added later goes on from the first one's.
export function answerOf(turn, side) {
  const wanted = side < turn.sides ? side : 0;
  return turn.answers.find((answer) => answer.side === wanted);
}

// The sides that answer after `turn`, whose calls have results.
export function sidesWithCalls(turn, numSides) {
  return [...Array(numSides).keys()].filter((side) => answerOf(turn, side)?.calls.length);
}

// What a side is asked in `turn`, as OpenAI's messages.
export function messagesOf(conversation, turn, side) {
  const { system } = turn.answers.find((answer) => answer.side === side).settings;
  const messages = system ? [{ role: "system", content: system }] : [];
  let before = null;
  for (const each of conversation.turns) {
    const answer = answerOf(each, side);
    if (each.results && !before?.calls.length) continue;
    if (!each.results) messages.push({ role: "user", content: each.prompt });
    else for (const result of each.results) messages.push(...toolMessages(result, before.side));
    if (each === turn) break;
    if (answer) messages.push(assistantMessage(answer));
    before = answer;
  }
  return messages;
}

const toolMessages = ({ calls, text }, side) =>
  calls.filter(([of]) => of === side).map(([, id]) => ({ role: "tool", tool_call_id: id, content: text }));

function assistantMessage({ text, calls }) {
  if (!calls.length) return { role: "assistant", content: text };
  const called = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return { role: "assistant", content: text || null, tool_calls: called };
}
