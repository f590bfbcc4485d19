// Chats of an exact number of tokens. Every call gets another first word after the template's opening, so that no engine
// can answer out of what it kept from the call before.

const system = "You are a careful assistant who answers at length.";
const openers = ["North", "South", "East", "West", "Red", "Green", "Blue", "Black", "White", "Gold", "Iron", "Stone", "River", "Forest", "Summer", "Winter"];
const text = `A small town keeps its bicycles in a shed beside the station. Every morning people take one, ride to work, and leave it near the river or the school. By noon the shed is
empty, the river has too many, and two helpers with a trailer carry some of them back. The town wants to know how many bicycles it needs, how often the trailer should drive, and where a
second shed would help most. The clerk has a list with the time and place of each ride of the last year, the weather of each day, and the days on which there was a market or a concert. Rides
are short in winter and long in June, and on rainy mornings hardly anybody comes, though the same people ride home when the sky clears. Some bicycles are always in repair, mostly because of
flat tyres, and a repair takes two days since the workshop opens only on Tuesday and Friday. A student offers to write a program that simulates a week, ride by ride, and asks which numbers
it should print. The mayor would rather have one page with a clear answer than a hundred charts, but she also wants to see how sure the answer is and which guess matters the most for it.
The council pays for ten new bicycles a year, or for one shed, but not for both, and it must decide before the spring. A shop offers older bicycles for half the price, which need twice as many repairs. Explain step by step how you
would go about it, which data you would look at first, how you would test the program against the past year, and what would make you change your mind. Then write down the page for the mayor.`.split(/\s+/);

/** A chat that the model's template turns into `tokens` tokens, by `count(messages)`; exact to a token where words allow. */
export async function chatOf(tokens, salt, count) {
  const build = (words) => [
    { role: "system", content: `${openers[salt % openers.length]}: ${system}` },
    { role: "user", content: Array.from({ length: words }, (_, i) => text[i % text.length]).join(" ") },
  ];
  let low = 1;
  let high = tokens;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((await count(build(middle))) <= tokens) low = middle;
    else high = middle - 1;
  }
  const messages = build(low);
  // One-token words fill up what the last word did not.
  while ((await count([messages[0], { role: "user", content: `${messages[1].content} and` }])) <= tokens) messages[1].content += " and";
  return messages;
}

/** What the second turn asks. */
export const followUp = "Now say it again in one short sentence, please.";
