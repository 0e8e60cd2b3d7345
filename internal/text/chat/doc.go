// Package chat renders conversations into prompts with the model's own Jinja
// template, so that the text is the one the model was trained on.
//
// What the template says is what is rendered, with three departures that the
// product wants: a developer turn is a system turn, a later system turn stays
// where it is, and a history without a user's question renders. The template
// itself still refuses everything else it refuses; its words reach the caller in
// a RaiseError.
//
// Literal text never becomes a control token. A user may write <|im_end|>; in the
// prompt it must not end the turn. A rendered Prompt therefore knows which of its
// characters the template wrote, and Encode reads control spellings only in
// those. To learn it, every template is compiled twice: as it is, and with an
// invisible mark behind each character of those string literals that reach the
// output. Both are rendered; without its marks the second text must be the
// first, else Render fails rather than guess. Marking the template and not the
// messages leaves trimming, comparisons and JSON as they are, and a spelling put
// together from both sides, such as a parameter name <|im_end| before the
// template's >, is plain text too.
//
// JSON keeps its order and its spelling: members stay in the order received, and
// a number is written as it was read, 1.0 as 1.0 and 1e3 as 1e3.
//
// Templates may be used by any number of goroutines.
package chat
