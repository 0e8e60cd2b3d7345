package front

import "fmt"

// Codes of an Error: the client's mistakes.
const (
	CodeInvalidValue    = "invalid_value"
	CodeInvalidPrompt   = "invalid_prompt"
	CodeContextLength   = "context_length_exceeded"
	CodeBudgetCapacity  = "thinking_budget_capacity_insufficient"
	CodeEffort          = "reasoning_effort_not_supported"
	CodeTemplateOptions = "conflicting_template_option"
)

// Error is a refusal of a request. All three protocols and the command line report it in their own form.
type Error struct {
	Code    string
	Param   string // the request's field in the spelling of Chat Completions, or empty
	Message string

	Tokens, Limit int // of CodeContextLength: what the prompt has, and may have
}

func (e *Error) Error() string { return e.Message }

func refuse(code, param, format string, args ...any) *Error {
	return &Error{Code: code, Param: param, Message: fmt.Sprintf(format, args...)}
}
