package server

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// responseRoute returns the handlers of a path below /v1/responses/, none if there is no such path (docs/serving.md, Responses).
func (s *Server) responseRoute(path string) handlers {
	id, rest, _ := strings.Cut(path, "/")
	if id == "" {
		return nil
	}
	with := func(h func(*exchange, string)) func(*exchange) { return func(x *exchange) { h(x, id) } }
	switch rest {
	case "":
		if strings.Contains(path, "/") {
			return nil
		}
		return handlers{http.MethodGet: with(s.oneResponse), http.MethodDelete: with(s.deleteResponse)}
	case "input_items":
		return handlers{http.MethodGet: with(s.responseItems)}
	case "cancel":
		return handlers{http.MethodPost: with(s.cancelResponse)}
	}
	return nil
}

func (s *Server) oneResponse(x *exchange, id string) {
	query := x.r.URL.Query()
	for _, c := range []struct{ name, code string }{
		{"stream", "retrieve_stream_not_supported"}, {"starting_after", "stream_recovery_not_supported"}, {"include", "include_not_supported"}, {"include[]", "include_not_supported"},
	} {
		for _, v := range query[c.name] {
			if v != "" && (c.name != "stream" || v != "false") {
				x.fail(bad(c.code, strings.TrimSuffix(c.name, "[]"), "%s is not supported: a response can only be read as it is kept", strings.TrimSuffix(c.name, "[]")))
				return
			}
		}
	}
	record, ok := s.store.get(id)
	if !ok {
		x.fail(noResponse("response_id", id))
		return
	}
	x.send(http.StatusOK, record.object)
}

func (s *Server) deleteResponse(x *exchange, id string) {
	if !s.store.remove(id) {
		x.fail(noResponse("response_id", id))
		return
	}
	x.reply(http.StatusOK, struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Deleted bool   `json:"deleted"`
	}{id, "response.deleted", true})
}

func (s *Server) cancelResponse(x *exchange, _ string) {
	x.fail(bad("background_not_supported", "", "only background responses can be cancelled, and there are none; a client ends its response by closing the connection"))
}

func (s *Server) compactResponse(x *exchange) {
	x.fail(bad("compaction_not_supported", "", "compaction is not supported"))
}

// imageInclude is the member of include that shows where pictures came from.
const imageInclude = "message.input_image.image_url"

// responseItems lists what a response was made from: the items of the responses before it and its own input.
func (s *Server) responseItems(x *exchange, id string) {
	query := x.r.URL.Query()
	limit, ascending, refused := page(query)
	if refused != nil {
		x.fail(refused)
		return
	}
	images := false
	for _, name := range []string{"include", "include[]"} {
		for _, v := range query[name] {
			if v != imageInclude {
				x.fail(bad("include_not_supported", "include", "include %q is not supported, only %s", v, imageInclude))
				return
			}
			images = true
		}
	}
	record, ok := s.store.get(id)
	if !ok {
		x.fail(noResponse("response_id", id))
		return
	}
	items := append(record.turn.parent.items(), record.turn.input...)
	if !ascending {
		slices.Reverse(items)
	}
	if after := query.Get("after"); after != "" {
		i := slices.IndexFunc(items, func(v jsontext.Value) bool { return itemID(v) == after })
		if i < 0 {
			x.fail(bad("invalid_pagination", "after", "after %q is no item of the response", after))
			return
		}
		items = items[i+1:]
	}
	answer := struct {
		Object  string           `json:"object"`
		Data    []jsontext.Value `json:"data"`
		FirstID *string          `json:"first_id"`
		LastID  *string          `json:"last_id"`
		HasMore bool             `json:"has_more"`
	}{Object: "list", Data: items[:min(limit, len(items))], HasMore: len(items) > limit}
	if n := len(answer.Data); n > 0 {
		first, last := itemID(answer.Data[0]), itemID(answer.Data[n-1])
		answer.FirstID, answer.LastID = &first, &last
	}
	if !images {
		for i, v := range answer.Data {
			answer.Data[i] = withoutImages(v)
		}
	}
	x.reply(http.StatusOK, answer)
}

// page reads what part of a list is wanted.
func page(query url.Values) (limit int, ascending bool, err *failure) {
	limit = 20
	if v := query.Get("limit"); v != "" || query.Has("limit") {
		n, fault := strconv.Atoi(v)
		if fault != nil || n < 1 || n > 100 {
			return 0, false, bad("invalid_pagination", "limit", "limit must be 1 to 100")
		}
		limit = n
	}
	switch query.Get("order") {
	case "asc":
		ascending = true
	case "desc", "":
	default:
		return 0, false, bad("invalid_pagination", "order", "order must be asc or desc")
	}
	return limit, ascending, nil
}

func itemID(item jsontext.Value) string {
	var v struct {
		ID string `json:"id"`
	}
	json.Unmarshal(item, &v, jsontext.AllowDuplicateNames(true)) // it was stored as JSON
	return v.ID
}

// withoutImages takes the addresses of pictures out of an item, which may be the pictures themselves.
func withoutImages(item jsontext.Value) jsontext.Value {
	var members map[string]jsontext.Value
	if json.Unmarshal(item, &members, jsontext.AllowDuplicateNames(true)) != nil {
		return item
	}
	changed := false
	for _, name := range []string{"content", "output"} {
		var parts []jsontext.Value
		if members[name].Kind() != '[' || json.Unmarshal(members[name], &parts, jsontext.AllowDuplicateNames(true)) != nil {
			continue
		}
		for i, raw := range parts {
			out, any := []byte{'{'}, false
			each(raw, func(member string, value jsontext.Value) {
				if member == "image_url" {
					value, any = jsontext.Value("null"), true
				}
				if len(out) > 1 {
					out = append(out, ',')
				}
				out, _ = jsontext.AppendQuote(out, member)
				out = append(append(out, ':'), value...)
			})
			if any {
				parts[i], changed = append(out, '}'), true
			}
		}
		members[name] = marshal(parts)
	}
	if !changed {
		return item
	}
	out := []byte{'{'}
	each(item, func(member string, _ jsontext.Value) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out, _ = jsontext.AppendQuote(out, member)
		out = append(append(out, ':'), members[member]...)
	})
	return append(out, '}')
}
